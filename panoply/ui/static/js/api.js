// Questions to the server. Each answer is JSON; a refusal is an Error with the server's sentence.

export async function ask(what, query = {}) {
  const words = new URLSearchParams(query);
  const answer = await fetch(`/api/${what}?${words}`);
  const text = await answer.text();
  let found = null;
  try {
    found = JSON.parse(text);
  } catch {
    /* a refusal in plain words */
  }
  if (!answer.ok) throw new Error(found?.error ?? text.trim() ?? `The server answered ${answer.status}.`);
  return found;
}
