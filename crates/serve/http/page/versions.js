// Versions of a conversation from one turn on. A turn that is regenerated or changed is kept,
// together with all turns after it, next to the new one.
//
// `chat.turns` has the turns that are shown. The first turn of a version has `versions`, the lists
// of turns of all versions, and `version`, its own index there. The shown one is `null` there,
// because its turns are those of the chat.

/** Puts a turn in the place of that at `index`, and keeps that one with all after it. */
export function replace(chat, index, turn) {
  const turns = chat.turns.splice(index);
  const { versions, version } = take(turns[0]);
  // A question without an answer is not worth keeping.
  if (turns[0].answer) {
    versions[version] = turns;
    put(turn, [...versions, null], versions.length);
  } else {
    put(turn, versions, version);
  }
  chat.turns.push(turn);
}

/** Shows version `number` of the turn at `index`. */
export function choose(chat, index, number) {
  const turns = chat.turns.splice(index);
  const { versions, version } = take(turns[0]);
  const chosen = versions[number];
  versions[version] = turns;
  versions[number] = null;
  put(chosen[0], versions, number);
  chat.turns.push(...chosen);
}

/**
 * Removes the turn at `index`. The turns after it stay, unless it has other versions: then another
 * one is shown from there on.
 */
export function remove(chat, index) {
  const { versions, version } = take(chat.turns[index]);
  if (versions.length === 1) {
    chat.turns.splice(index, 1);
    return;
  }
  versions.splice(version, 1);
  const number = Math.max(version - 1, 0);
  const chosen = versions[number];
  versions[number] = null;
  put(chosen[0], versions, number);
  chat.turns.splice(index, Infinity, ...chosen);
}

/** Takes the versions from the turn that has them. */
function take(turn) {
  const { versions = [null], version = 0 } = turn;
  delete turn.versions;
  delete turn.version;
  return { versions, version };
}

function put(turn, versions, version) {
  if (versions.length > 1) Object.assign(turn, { versions, version });
}

/** Whether stored turns are what this page has written. */
export function areTurns(turns) {
  return Array.isArray(turns) && turns.every((turn) =>
    typeof turn?.question === "string" && (turn.answer ?? "").constructor === String &&
    (turn.image === undefined || String(turn.image).startsWith("data:image/")) &&
    (turn.files === undefined || areFiles(turn.files)) &&
    (turn.versions === undefined || areVersions(turn)));
}

const areFiles = (files) => Array.isArray(files) &&
  files.every((file) => typeof file?.name === "string" && typeof file.text === "string");

const areVersions = ({ versions, version }) => Array.isArray(versions) &&
  versions[version] === null && versions.every((turns, number) =>
    number === version || (areTurns(turns) && turns.length > 0));
