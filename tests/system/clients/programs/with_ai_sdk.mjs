// The AI SDK of npm with its providers of OpenAI, of servers like it, and of Anthropic: text, streams, tools, objects.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const URL = process.env.SERVER_URL, KEY = process.env.SERVER_KEY, MODEL = "outrider-demo";
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const compatible = createOpenAICompatible({ name: "here", baseURL: `${URL}/v1`, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY });
const MODELS = { responses: openai.responses(MODEL), chat: openai.chat(MODEL), compatible: compatible(MODEL), messages: anthropic(MODEL) };
const CITIES = ["Oslo", "Rome"];
const NAMED = { type: "tool", toolName: "place" };
const place = z.object({ city: z.enum(CITIES) }).strict();
const tools = { place: tool({ description: "Where", inputSchema: place, execute: async ({ city }) => `rain in ${city}` }) };
const given = { maxOutputTokens: 80, temperature: 0, maxRetries: 0 };

const checks = {
  async text(model) {
    const { usage } = await generateText({ model, ...given, system: "be brief", prompt: "import os" });
    assert(usage.outputTokens > 0 && usage.inputTokens > 0);
  },
  async stream(model) {
    const result = streamText({ model, ...given, prompt: "import os", onError: ({ error }) => { throw error; } });
    let text = "";
    for await (const delta of result.textStream) text += delta;
    assert(text.length > 0);
    assert((await result.usage).outputTokens > 0);
  },
  async call(model) {
    const { toolCalls, toolResults } = await generateText({ model, ...given, tools, toolChoice: NAMED, prompt: "where?" });
    assert(toolCalls.length > 0 && toolCalls.every((each) => CITIES.includes(each.input.city)));
    assert(toolResults[0].output.startsWith("rain"));
  },
  async callInAStream(model) {
    const result = streamText({ model, ...given, tools, toolChoice: NAMED, prompt: "where?", onError: ({ error }) => { throw error; } });
    const parts = [];
    for await (const part of result.fullStream) parts.push(part);
    const [call] = parts.filter((part) => part.type === "tool-call");
    assert(CITIES.includes(call.input.city));
    const deltas = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta).join("");
    assert.deepEqual(JSON.parse(deltas), call.input);
  },
  async callsComeBack(model) {
    const first = await generateText({ model, ...given, tools, toolChoice: NAMED, prompt: "where?" });
    const messages = [{ role: "user", content: "where?" }, ...first.response.messages, { role: "user", content: "and?" }];
    const second = await generateText({ model, ...given, tools, messages });
    assert(second.usage.inputTokens > 0);
  },
  async textComesBack(model) {
    const unstored = { ...given, providerOptions: { openai: { store: false } } };
    const first = await generateText({ model, ...unstored, prompt: "import os" });
    const messages = [{ role: "user", content: "import os" }, ...first.response.messages, { role: "user", content: "and?" }];
    const second = await generateText({ model, ...unstored, messages });
    assert(second.usage.inputTokens > first.usage.inputTokens);
  },
  async object(model) {
    const { output } = await generateText({ model, ...given, output: Output.object({ schema: place }), prompt: "where?" });
    assert(CITIES.includes(output.city));
  },
  async objectInAStream(model) {
    const result = streamText({ model, ...given, output: Output.object({ schema: place }), prompt: "where?" });
    let last;
    for await (const partial of result.partialOutputStream) last = partial;
    assert(CITIES.includes(last.city));
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  for (const [api, model] of Object.entries(MODELS)) {
    try {
      await check(model);
      console.log("held", name, api);
    } catch (error) {
      failed += 1;
      console.log("FAILED", name, api, error);
    }
  }
}
process.exit(failed ? 1 : 0);
