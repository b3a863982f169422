"""PDF files written by hand: pages of text in Helvetica and its bold form."""

from __future__ import annotations

from collections.abc import Sequence


def pdf_of(pages: Sequence[str]) -> bytes:
    """Return a PDF file whose pages show these texts; only Latin-1 letters, no brackets."""
    return assemble_pdf([f"BT /F1 12 Tf 14 TL 50 800 Td {shown_lines(page)} ET" for page in pages])


def shown_lines(text: str) -> str:
    """Return the operators that show the lines of a text below each other."""
    return " ".join(f"({line}) Tj T*" for line in text.split("\n"))


def assemble_pdf(contents: Sequence[str]) -> bytes:
    """Return a PDF file with a page for each content; its fonts are F1, and F2 in bold."""
    kids = " ".join(f"{5 + 2 * number} 0 R" for number in range(len(contents)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(contents)} >>"]
    for font in ("Helvetica", "Helvetica-Bold"):
        objects.append(f"<< /Type /Font /Subtype /Type1 /BaseFont /{font} /Encoding /WinAnsiEncoding >>")
    for number, content in enumerate(contents):
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R /F2 4 0 R >> >> "
            f"/Contents {6 + 2 * number} 0 R >>",
            f"<< /Length {len(content.encode('latin-1'))} >>\nstream\n{content}\nendstream",
        ]
    body, offsets = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    xref = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    return body + f"{xref}{trailer}".encode()
