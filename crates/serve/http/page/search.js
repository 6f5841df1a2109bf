// Search on the reference page: shows only the routes and types that have all words.

const entries = [...document.querySelectorAll("details")].map((element) => ({
  element,
  wasOpen: element.open,
  text: element.textContent.toLowerCase(),
  name: (element.id + element.querySelector("summary").textContent).toLowerCase(),
}));
/** Results are opened if there are at most this many. */
const FEW = 8;

const input = document.createElement("input");
input.type = "search";
input.id = "search";
input.placeholder = "Search routes, parameters and types (press /)";
input.setAttribute("aria-label", "Search");
const found = document.createElement("p");
found.setAttribute("role", "status");
const box = document.createElement("search");
box.append(input, found);
document.querySelector("h2").before(box);

/** Finds words with this beginning: “pin” is not found in “mapping”. */
const beginning = (word) =>
  new RegExp(`(^|[^a-z0-9])${word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}`);

function search() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean).map(beginning);
  const results = entries.filter(({ text }) => words.every((word) => word.test(text)));
  for (const entry of entries) {
    const { element, name, wasOpen } = entry;
    element.hidden = !results.includes(entry);
    // If there are many results, only those with the words in their names are opened.
    const isOpen = results.length <= FEW || words.every((word) => word.test(name));
    element.open = words.length ? isOpen : wasOpen;
  }
  for (const heading of document.querySelectorAll("h2")) {
    heading.hidden = words.length > 0 && !hasResults(heading);
  }
  found.textContent = words.length ? `${results.length} of ${entries.length} found` : "";
  history.replaceState(null, "", words.length ? `?q=${encodeURIComponent(input.value)}` : "?");
}

/** Whether an entry below a heading is shown. */
function hasResults(heading) {
  for (let next = heading.nextElementSibling; next; next = next.nextElementSibling) {
    if (next.tagName === "H2") return false;
    if (next.tagName === "DETAILS" && !next.hidden) return true;
  }
  return false;
}

input.addEventListener("input", search);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target === input) return;
  event.preventDefault();
  input.focus();
});
// A link to a type leads to it even if the search has hidden it.
addEventListener("hashchange", () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target?.hidden) return;
  input.value = "";
  search();
  target.open = true;
  target.scrollIntoView();
});
input.value = new URLSearchParams(location.search).get("q") ?? "";
if (input.value) search();
