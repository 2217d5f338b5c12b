/** One answer in the making: takes the chunks of a stream into a message. Knows nothing of the page. */

/**
 * Fills `node` until the answer is over. Aborting the signal ends it as "stopped", a failure as "error".
 * `changed` is told of every step.
 */
export async function fillAnswer(node, chunks, signal, changed) {
  let thinkingSince = null;
  const endThinking = () => {
    if (thinkingSince !== null) node.reasoningSeconds = (performance.now() - thinkingSince) / 1000;
    thinkingSince = null;
  };
  try {
    for await (const chunk of chunks) {
      const choice = chunk.choices?.[0];
      if (choice) {
        const content = choice.delta?.content ?? "";
        const reasoning = choice.delta?.reasoning_content ?? "";
        if (reasoning) {
          thinkingSince ??= performance.now() - (node.reasoningSeconds ?? 0) * 1000;
          node.reasoning += reasoning;
          node.reasoningSeconds = (performance.now() - thinkingSince) / 1000;
        }
        if (content) {
          endThinking();
          node.content += content;
        }
        takeTokens(node, choice.token_details ?? [], Boolean(reasoning), Boolean(content));
        if (content || reasoning || choice.token_details?.length) node.state = "streaming";
        if (choice.finish_reason) node.finish = choice.finish_reason;
      }
      if (chunk.usage) node.statistics = statisticsOf(chunk);
      if (chunk.forerun?.proof) node.proof = chunk.forerun.proof;
      changed();
    }
    node.state = "done";
  } catch (error) {
    node.state = signal.aborted ? "stopped" : "error";
    if (!signal.aborted)
      node.error = { message: error.message, param: error.param ?? null, retryAfter: error.retryAfter ?? null };
  }
  endThinking();
  changed();
}

/**
 * Tokens as [text, source, round, thinking]: they are many, and kept. Those of a chunk without text go with the ones
 * before.
 */
function takeTokens(node, details, reasoning, content) {
  const thinking = reasoning || (!content && Boolean(node.reasoning) && !node.content) ? 1 : 0;
  for (const { text, source, round } of details) node.tokens.push([text, source || "model", round, thinking]);
}

function statisticsOf({ usage, timings = {}, forerun = {} }) {
  return {
    tokens: usage.completion_tokens,
    promptTokens: usage.prompt_tokens,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    reasoningTokens: usage.completion_tokens_details?.reasoning_tokens ?? null,
    tokensPerSecond: timings.predicted_per_second ?? null,
    promptSeconds: timings.prompt_ms === undefined ? null : timings.prompt_ms / 1000,
    drafted: timings.draft_n ?? null,
    accepted: timings.draft_n_accepted ?? null,
    tokensPerRound: forerun.tokens_per_round ?? null,
    secondsSaved: forerun.seconds_saved ?? null,
    seed: forerun.seed ?? null,
    guaranteed: forerun.guaranteed ?? null,
  };
}
