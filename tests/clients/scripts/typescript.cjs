// Drives a tool host with the TypeScript SDK, both of its lines. Runs in the environment of Node clients.
//
// usage: typescript.cjs URL WHICH SCRIPT   WHICH: v1-http, v1-sse or v2; SCRIPT: a JSON list of connections:
// {"headers": {...}, "calls": [[tool, args], ...]}. It prints one JSON object, as mcp_sse.py does.

const [url, which, script] = process.argv.slice(2);

function transport(headers) {
  const options = { requestInit: { headers } };
  if (which === "v2") {
    const { StreamableHTTPClientTransport } = require("@modelcontextprotocol/client");
    return new StreamableHTTPClientTransport(new URL(url), options);
  }
  if (which === "v1-http") {
    const { StreamableHTTPClientTransport } = require("@modelcontextprotocol/sdk/client/streamableHttp.js");
    return new StreamableHTTPClientTransport(new URL(url), options);
  }
  const { SSEClientTransport } = require("@modelcontextprotocol/sdk/client/sse.js");
  // This transport gives the headers to its POSTs only; the stream takes them from its own fetch.
  const withHeaders = (address, init) =>
    fetch(address, { ...init, headers: { ...Object.fromEntries(new Headers(init.headers)), ...headers } });
  return new SSEClientTransport(new URL(url), { ...options, eventSourceInit: { fetch: withHeaders } });
}

function client() {
  const me = { name: "typescript", version: "0" };
  if (which === "v2") {
    const { Client } = require("@modelcontextprotocol/client");
    return new Client(me, { versionNegotiation: { mode: "auto" } });
  }
  const { Client } = require("@modelcontextprotocol/sdk/client/index.js");
  return new Client(me);
}

async function main() {
  const report = { connections: [] };
  for (const connection of JSON.parse(script)) {
    const session = client();
    await session.connect(transport(connection.headers ?? {}));
    report.name = session.getServerVersion().name;
    report.protocol = which === "v2" ? session.getNegotiatedProtocolVersion() : "";
    const { tools } = await session.listTools();
    report.tools = Object.fromEntries(tools.map((tool) => [tool.name, tool.annotations]));
    const results = [];
    for (const [name, args] of connection.calls) {
      const result = await session.callTool({ name, arguments: args });
      results.push({ text: result.content[0].text, blocks: result.content.length, is_error: Boolean(result.isError) });
    }
    report.resources = (await session.listResources()).resources.map((resource) => resource.uri);
    report.connections.push(results);
    await session.close();
  }
  console.log("REPORT " + JSON.stringify(report));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
