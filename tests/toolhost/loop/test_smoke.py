from tests.toolhost.loop.checks import check_stream
from toolhost.loop.request import LoopRequest
async def test_x(make_loop):
    driver, model = await make_loop([
      {"reasoning":"let me think", "calls":[{"name":"python","arguments":{"code":"x=1\nprint(x)"}},{"name":"browser.search","arguments":{"query":"cats"}}]},
      {"text":"hello there, the answer is 1"}])
    run = await driver.start(LoopRequest("fake","hi",tools=[{"type":"code_interpreter","container":{"type":"auto"}},{"type":"web_search"}]))
    events=[e async for e in run.events()]
    for e in events: print(e.type, getattr(e,'delta',''))
    r=await run.result()
    print(r.trace.as_data()); print(model.requests[1]["messages"])
    check_stream(events)
    assert r.response.output_text
