// The search box above the tables of supported models, in reference/hugging_face.md.
const texts = (row) => [...row.cells].map((cell) => cell.textContent.trim());
const title = (table) => texts(table.rows[0])[1];
const box = document.querySelector("#model-search");
if (box) {
  const tables = [...document.querySelectorAll("details table")].filter((table) => /^(not )?packed$/.test(title(table)));
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows].map((row) => [title(table), ...texts(row)]));
  // One entry for each name: "t5 (sequence)", the title of its table, the text beside it.
  const models = rows.flatMap(([title, names, text]) => names.match(/[\w-]+( \([^)]*\))?/g).map((name) => [name, title, text]));
  const input = Object.assign(document.createElement("input"), {type: "search", placeholder: "model_type, such as qwen3"});
  const list = document.createElement("ul");
  input.setAttribute("aria-label", "Search the supported models");
  input.oninput = () => {
    const hits = models.filter(([name]) => input.value && name.includes(input.value.trim().toLowerCase())).sort();
    const lines = hits.slice(0, 12).map((hit) => `${hit[0]}: ${hit[1]}: ${hit[2]}`);
    if (input.value && !hits.length) lines.push("Not in the tables: run check-models, or nta.patch(model).");
    list.replaceChildren(...lines.map((line) => Object.assign(document.createElement("li"), {textContent: line})));
  };
  box.append(input, list);
}
