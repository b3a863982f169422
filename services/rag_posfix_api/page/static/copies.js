// The request of the page as text for other programs.

export const LANGUAGES = ["curl", "Python", "langchain"];

/** The text in one of LANGUAGES. `address` is that of the service, without a path; `needsKey` whether it wants a key. */
export function copyText(language, address, body, needsKey) {
  const write = { curl, Python: python, langchain }[language];
  return write(address, body, needsKey);
}

function curl(address, body, needsKey) {
  const lines = [`curl ${address}/v1/chat/completions`, "  -H 'Content-Type: application/json'"];
  if (needsKey) lines.push('  -H "Authorization: Bearer $RAG_POSFIX_KEY"');
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `${lines.join(" \\\n")} \\\n  -d '${quoted}'`;
}

function python(address, body, needsKey) {
  const { documents, posfix, model, messages, max_tokens: most, temperature } = body;
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${address}/v1", api_key=${keyIn(needsKey)})
answer = client.chat.completions.create(
    model=${literal(model)},
    messages=${literal(messages, 1)},
    max_tokens=${most},
    temperature=${temperature},
    extra_body=${literal({ documents, posfix }, 1)},
)
print(answer.choices[0].message.content)
`;
}

function langchain(address, body, needsKey) {
  const { documents, posfix, model, messages, max_tokens: most, temperature } = body;
  return `${needsKey ? "import os\n\n" : ""}from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url="${address}/v1",
    api_key=${keyIn(needsKey)},
    model=${literal(model)},
    max_tokens=${most},
    temperature=${temperature},
    extra_body=${literal({ documents, posfix }, 1)},
)
print(model.invoke(${literal(messages[0].content)}).content)
`;
}

function keyIn(needsKey) {
  return needsKey ? 'os.environ["RAG_POSFIX_KEY"]' : '"none"';
}

/** A JSON value as a Python literal. A string of JSON is one of Python too; true, false and null do not occur. */
function literal(value, indent = 0) {
  return JSON.stringify(value, null, 4).replaceAll("\n", `\n${"    ".repeat(indent)}`);
}
