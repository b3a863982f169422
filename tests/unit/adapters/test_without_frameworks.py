import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [
        ("rag_posfix.adapters.haystack", "haystack", "haystack"),
        ("rag_posfix.adapters.llama_index", "llama_index", "llama-index"),
    ],
)
@pytest.mark.slow
def test_an_adapter_whose_framework_is_missing_names_the_extra(module, framework, extra):
    code = f"import sys; sys.modules['{framework}'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = f"{framework} is not installed; in a copy of the repository run: pip install '.[{extra}]'"
    assert done.stderr.strip().splitlines()[-1].endswith(expected)


@pytest.mark.slow
def test_the_library_imports_no_framework():
    code = (
        "import sys, rag_posfix; rag_posfix.PosfixRAG, rag_posfix.PosfixRetriever; "
        "print([name for name in ('haystack', 'llama_index') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
