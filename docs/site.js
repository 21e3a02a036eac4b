// The search box above the tables of supported models, in reference/hugging_face.md. What it searches in is
// reference/supported_models.json, which tools/supported_models.py writes. tests/project/test_supported_models.py has the
// same search in Python, and compares the two.

// The lines about a class ("LlamaForCausalLM"), a model type ("llama"), a part of one, or a name on the Hub
// ("meta-llama/Llama-3.2-1B", "bge-m3").
function find(query, data) {
  const wanted = query.trim().toLowerCase();
  const name = wanted.split("/").pop().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  if (!name) return [];
  const ofType = (kind) => data.types[kind].map((line) => `${kind}: ${line}`);
  const ofClass = (each) => `${each} (${data.classes[each][0]}): ${data.classes[each][1] ? `not packed: ${data.classes[each][1]}` : "packed"}`;
  const classes = Object.keys(data.classes);
  const same = classes.filter((each) => each.toLowerCase() === wanted);
  if (same.length) return same.map(ofClass);
  const types = Object.keys(data.types).filter((kind) => kind.includes(wanted)).sort((a, b) => a.length - b.length || (a < b ? -1 : 1));
  const parts = [...types.flatMap(ofType), ...classes.filter((each) => each.toLowerCase().startsWith(wanted)).map(ofClass)];
  if (parts.length) return parts.slice(0, 12);
  const kind = (data.names.find(([pattern]) => new RegExp(pattern).test(name)) || ["", ""])[1];
  if (!kind) return [`${query.trim()} is not in the tables: it is checked when you patch.`];
  return [`By its name, its type is ${kind}. To be sure, see model_type in its config.json.`, ...ofType(kind)];
}

function showSearch(box, data) {
  const placeholder = "LlamaForCausalLM, qwen3, or sentence-transformers/all-mpnet-base-v2";
  const input = Object.assign(document.createElement("input"), {type: "search", placeholder});
  const list = document.createElement("ul");
  input.setAttribute("aria-label", "Search the supported models");
  input.oninput = () => {
    list.replaceChildren(...find(input.value, data).map((line) => Object.assign(document.createElement("li"), {textContent: line})));
  };
  box.replaceChildren(input, list);
  if ((input.value = new URLSearchParams(location.search).get("model") || "")) input.oninput();
}

if (typeof module !== "undefined") {
  module.exports = {find};
} else {
  const box = document.querySelector("#model-search");
  if (box) fetch(box.dataset.models).then((response) => response.json()).then((data) => showSearch(box, data));
}
