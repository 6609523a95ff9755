// Bodies in, bodies out, without sockets or an engine: what is accepted, how a refusal reads, what
// responses and stream chunks look like.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/metrics.h"
#include "server/reasoning_splitter.h"
#include "server/request_parser.h"
#include "server/response_writer.h"

namespace lacuna::server {
namespace {

using Json = nlohmann::json;

TEST(ParseCompletion, ReadsEveryParameter) {
  GenerationRequest request;
  const auto error = parse_completion(R"({"model":"m","prompt":"hi","max_tokens":7,"min_tokens":2,
      "temperature":0.5,"top_p":0.9,"top_k":-1,"min_p":0.1,"seed":-3,"n":2,"stop":"\n",
      "stop_token_ids":[5],"include_stop_str_in_output":true,"ignore_eos":true,
      "presence_penalty":-2,"frequency_penalty":2,"repetition_penalty":1.5,
      "logit_bias":{"7":-100,"8":1.5},"skip_special_tokens":false,"logprobs":3,"echo":true,
      "priority":-4,"record_selection":true,"user":"u","unknown":{"a":[1]},"suffix":null,
      "best_of":2})",
                                      &request);
  ASSERT_FALSE(error.has_value()) << error->message;
  const SamplingParams& sampling = request.sampling;
  EXPECT_EQ(request.model, "m");
  ASSERT_EQ(request.prompts.size(), 1u);
  EXPECT_EQ(request.prompts[0].text, "hi");
  EXPECT_EQ(request.max_tokens, 7);
  EXPECT_EQ(sampling.min_tokens, 2);
  EXPECT_EQ(sampling.temperature, 0.5);
  EXPECT_EQ(sampling.top_p, 0.9);
  EXPECT_EQ(sampling.top_k, -1);
  EXPECT_EQ(sampling.min_p, 0.1);
  EXPECT_EQ(request.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(request.n, 2);
  EXPECT_EQ(sampling.stop, std::vector<std::string>{"\n"});
  EXPECT_EQ(sampling.stop_token_ids, std::vector<int32_t>{5});
  EXPECT_TRUE(sampling.include_stop_in_text);
  EXPECT_TRUE(sampling.ignore_eos);
  EXPECT_EQ(sampling.presence_penalty, -2);
  EXPECT_EQ(sampling.frequency_penalty, 2);
  EXPECT_EQ(sampling.repetition_penalty, 1.5);
  EXPECT_EQ(sampling.logit_bias, (std::map<int32_t, float>{{7, -100.f}, {8, 1.5f}}));
  EXPECT_FALSE(sampling.skip_special_tokens);
  EXPECT_TRUE(request.logprobs);
  EXPECT_EQ(sampling.top_logprobs, 3);
  EXPECT_TRUE(request.echo);
  EXPECT_EQ(request.priority, -4);
  EXPECT_TRUE(request.record_selection);
}

TEST(ParseCompletion, DefaultsAreThoseOfTheOpenAiApi) {
  GenerationRequest request;
  ASSERT_FALSE(parse_completion(R"({"prompt":""})", &request).has_value());
  EXPECT_EQ(request.sampling.temperature, 1);
  EXPECT_EQ(request.n, 1);
  EXPECT_FALSE(request.stream);
  EXPECT_FALSE(request.logprobs);
  EXPECT_FALSE(request.seed.has_value());
  EXPECT_FALSE(request.max_tokens.has_value());
}

TEST(ParseCompletion, PromptsComeInFourForms) {
  auto parse = [](const std::string& prompt) {
    GenerationRequest request;
    const auto error = parse_completion(R"({"prompt":)" + prompt + "}", &request);
    EXPECT_FALSE(error.has_value()) << error->message;
    return request.prompts;
  };
  EXPECT_EQ(parse(R"("a")")[0].text, "a");
  EXPECT_EQ(parse("[1,2]")[0].ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(parse(R"(["a","b"])")[1].text, "b");
  const std::vector<PromptInput> lists = parse("[[1],[2,3]]");
  ASSERT_EQ(lists.size(), 2u);
  EXPECT_TRUE(lists[1].is_ids);
  EXPECT_EQ(lists[1].ids, (std::vector<int32_t>{2, 3}));
}

struct BadBody {
  const char* fields;  // besides prompt
  const char* param;
};

TEST(ParseCompletion, BadValuesNameTheParameter) {
  const BadBody cases[] = {
      {R"("max_tokens":-1)", "max_tokens"},
      {R"("max_tokens":1.5)", "max_tokens"},
      {R"("max_tokens":"7")", "max_tokens"},
      {R"("max_tokens":1e300)", "max_tokens"},
      {R"("max_tokens":99999999999999999999)", "max_tokens"},
      {R"("temperature":-0.1)", "temperature"},
      {R"("temperature":"hot")", "temperature"},
      {R"("top_p":0)", "top_p"},
      {R"("top_p":1.01)", "top_p"},
      {R"("top_k":-2)", "top_k"},
      {R"("min_p":2)", "min_p"},
      {R"("n":0)", "n"},
      {R"("n":1000)", "n"},
      {R"("best_of":3)", "best_of"},
      {R"("stop":[""])", "stop"},
      {R"("stop":5)", "stop"},
      {R"("stop":[1])", "stop"},
      {R"("stop_token_ids":5)", "stop_token_ids"},
      {R"("stop_token_ids":[-5])", "stop_token_ids"},
      {R"("stream":1)", "stream"},
      {R"("stream_options":{"include_usage":true})", "stream_options"},
      {R"("stream":true,"stream_options":[])", "stream_options"},
      {R"("stream":true,"stream_options":{"include_usage":3})", "stream_options"},
      {R"("presence_penalty":2.5)", "presence_penalty"},
      {R"("repetition_penalty":0)", "repetition_penalty"},
      {R"("logit_bias":[])", "logit_bias"},
      {R"("logit_bias":{"x":1})", "logit_bias"},
      {R"("logit_bias":{"1":101})", "logit_bias"},
      {R"("logprobs":21)", "logprobs"},
      {R"("logprobs":true)", "logprobs"},
      {R"("echo":true,"logprobs":1,"stream":true)", "echo"},
      {R"("prompt_logprobs":1,"stream":true)", "prompt_logprobs"},
      {R"("min_tokens":9,"max_tokens":8)", "min_tokens"},
      {R"("model":7)", "model"},
      {R"("seed":1.5)", "seed"},
      {R"("response_format":{"type":"json_object"})", "response_format"},
      {R"("guided_json":{"type":"object"})", "guided_json"},
      {R"("suffix":"x")", "suffix"},
      {R"("use_beam_search":true)", "use_beam_search"},
  };
  for (const BadBody& bad : cases) {
    GenerationRequest request;
    const auto error =
        parse_completion(std::string(R"({"prompt":"a",)") + bad.fields + "}", &request);
    ASSERT_TRUE(error.has_value()) << bad.fields;
    EXPECT_EQ(error->status, 400);
    EXPECT_EQ(error->param, bad.param) << bad.fields;
    EXPECT_NE(error->message.find(bad.param), std::string::npos) << error->message;
  }
}

TEST(ParseCompletion, BadPrompts) {
  for (const char* body :
       {"{}", R"({"prompt":null})", R"({"prompt":5})", R"({"prompt":[]})", R"({"prompt":[1,"a"]})",
        R"({"prompt":["a",1]})", R"({"prompt":[-1]})", R"({"prompt":[1.5]})",
        R"({"prompt":[4294967296]})", R"({"prompt":{"a":1}})", R"({"prompt":[[1],null]})"}) {
    GenerationRequest request;
    const auto error = parse_completion(body, &request);
    ASSERT_TRUE(error.has_value()) << body;
    EXPECT_EQ(error->param, "prompt") << body;
  }
}

TEST(ParseCompletion, HarmlessFormsOfUnsupportedParametersPass) {
  for (const char* fields :
       {R"("tools":[])", R"("tools":null)", R"("tool_choice":"none")", R"("tool_choice":"auto")",
        R"("response_format":{"type":"text"})", R"("suffix":"")", R"("best_of":1)",
        R"("use_beam_search":false)", R"("logit_bias":{})", R"("max_tokens":16.0)"}) {
    GenerationRequest request;
    const auto error = parse_completion(std::string(R"({"prompt":"a",)") + fields + "}", &request);
    EXPECT_FALSE(error.has_value()) << fields << ": " << error->message;
  }
}

TEST(ParseBody, MalformedBodiesAreRefused) {
  const std::string deep = std::string(100000, '[');
  for (const std::string& body :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"),
        std::string("{\"prompt\":\"\xff\"}"), std::string("{\"prompt\":\"a\"} x"), deep,
        "{\"prompt\":" + deep, std::string("{\"prompt\":1e999}"), std::string("\0", 1)}) {
    GenerationRequest request;
    const auto error = parse_completion(body, &request);
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->status, 400);
    const Json parsed = Json::parse(error_body(*error));
    EXPECT_EQ(parsed["error"]["type"], "invalid_request_error");
    EXPECT_TRUE(parsed["error"].contains("param"));
    EXPECT_TRUE(parsed["error"].contains("code"));
  }
  GenerationRequest request;
  EXPECT_FALSE(parse_completion(R"({"prompt":"[[[[{{{{\"[["})", &request).has_value());
}

TEST(ParseChat, JoinsTextPartsAndPassesTemplateOptions) {
  GenerationRequest request;
  const auto error = parse_chat(R"({"messages":[
      {"role":"system","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
      {"role":"assistant","content":null},{"role":"user","content":"hi","name":"x"}],
      "max_completion_tokens":9,"logprobs":true,"top_logprobs":2,
      "chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low"})",
                                &request);
  ASSERT_FALSE(error.has_value()) << error->message;
  const Json messages = Json::parse(request.messages_json);
  EXPECT_EQ(messages[0]["content"], "a\nb");
  EXPECT_EQ(messages[1]["content"], "");
  EXPECT_EQ(messages[2]["content"], "hi");
  const Json options = Json::parse(request.options_json);
  EXPECT_EQ(options["chat_template_kwargs"]["enable_thinking"], false);
  EXPECT_EQ(options["chat_template_kwargs"]["reasoning_effort"], "low");
  EXPECT_EQ(request.max_tokens, 9);
  EXPECT_TRUE(request.logprobs);
  EXPECT_EQ(request.sampling.top_logprobs, 2);
}

TEST(ParseChat, Refusals) {
  const BadBody cases[] = {
      {R"({})", "messages"},
      {R"({"messages":[]})", "messages"},
      {R"({"messages":"hi"})", "messages"},
      {R"({"messages":[5]})", "messages"},
      {R"({"messages":[{"content":"a"}]})", "messages"},
      {R"({"messages":[{"role":"user"}]})", "messages"},
      {R"({"messages":[{"role":"user","content":5}]})", "messages"},
      {R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":"x"}]}]})",
       "messages"},
      {R"({"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function"}]})", "tools"},
      {R"({"messages":[{"role":"user","content":"a"}],"tool_choice":"required"})", "tool_choice"},
      {R"({"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema"}})",
       "response_format"},
      {R"({"messages":[{"role":"user","content":"a"}],"top_logprobs":2})", "top_logprobs"},
      {R"({"messages":[{"role":"user","content":"a"}],"logprobs":2})", "logprobs"},
      {R"({"messages":[{"role":"user","content":"a"}],"max_tokens":0})", "max_tokens"},
      {R"({"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":5})",
       "chat_template_kwargs"},
  };
  for (const BadBody& bad : cases) {
    GenerationRequest request;
    const auto error = parse_chat(bad.fields, &request);
    ASSERT_TRUE(error.has_value()) << bad.fields;
    EXPECT_EQ(error->param, bad.param) << bad.fields;
  }
}

TEST(ParseTokenize, NeedsAPromptOrMessages) {
  TokenizeRequest request;
  EXPECT_TRUE(parse_tokenize("{}", &request).has_value());
  EXPECT_FALSE(parse_tokenize(R"({"prompt":"a"})", &request).has_value());
  DetokenizeRequest ids;
  EXPECT_TRUE(parse_detokenize("{}", &ids).has_value());
  EXPECT_TRUE(parse_detokenize(R"({"tokens":["a"]})", &ids).has_value());
  EXPECT_FALSE(parse_detokenize(R"({"tokens":[1,2]})", &ids).has_value());
}

Json data_of(const std::string& event) {
  EXPECT_TRUE(event.starts_with("data: ") && event.ends_with("\n\n")) << event;
  return Json::parse(event.substr(6));
}

TEST(Responses, FullCompletionAndChat) {
  ResponseHead head{.id = "cmpl-1", .created = 5, .model = "m"};
  ChoiceBody choice{.index = 0, .text = "hi\xff", .finish = "stop"};
  Json json = Json::parse(full_response(head, {choice}, {3, 2, 1}));
  EXPECT_EQ(json["object"], "text_completion");
  EXPECT_EQ(json["choices"][0]["text"], "hi\xEF\xBF\xBD");
  EXPECT_EQ(json["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(json["choices"][0]["logprobs"].is_null());
  EXPECT_EQ(json["usage"]["total_tokens"], 5);
  EXPECT_EQ(json["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
  head.chat = true;
  choice.reasoning = "because";
  json = Json::parse(full_response(head, {choice}, {3, 2, 1}));
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_EQ(json["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(json["choices"][0]["message"]["reasoning_content"], "because");
}

TEST(Responses, StreamChunks) {
  ResponseHead head{.chat = true, .id = "c", .created = 5, .model = "m"};
  Json json = data_of(stream_chunk(head, {.index = 1}, /*with_role=*/true, /*null_usage=*/true));
  EXPECT_EQ(json["object"], "chat.completion.chunk");
  EXPECT_EQ(json["choices"][0]["index"], 1);
  EXPECT_EQ(json["choices"][0]["delta"]["role"], "assistant");
  EXPECT_EQ(json["choices"][0]["delta"]["content"], "");
  EXPECT_TRUE(json["usage"].is_null());
  json = data_of(stream_chunk(head, {.text = "x"}, false, false));
  EXPECT_EQ(json["choices"][0]["delta"], Json({{"content", "x"}}));
  EXPECT_TRUE(json["choices"][0]["finish_reason"].is_null());
  EXPECT_FALSE(json.contains("usage"));
  json = data_of(stream_chunk(head, {.finish = "length"}, false, false));
  EXPECT_EQ(json["choices"][0]["delta"], Json::object());
  EXPECT_EQ(json["choices"][0]["finish_reason"], "length");
  json = data_of(usage_chunk(head, {1, 2, 0}));
  EXPECT_EQ(json["choices"], Json::array());
  EXPECT_EQ(json["usage"]["completion_tokens"], 2);
}

TEST(Responses, Logprobs) {
  const std::vector<TokenDetail> tokens = {
      {.id = 1, .bytes = "a", .has_logprob = false},
      {.id = 2, .bytes = "\xC3\xA4", .logprob = -0.5f, .top = {{3, "b", -0.25f}}},
      {.id = 4, .bytes = "\xC3", .logprob = -1, .top = {{4, "\xC3", -1}}}};
  int64_t offset = 0;
  Json json = completion_logprobs(tokens, &offset);
  EXPECT_EQ(json["text_offset"], (Json{0, 1, 2}));
  EXPECT_TRUE(json["token_logprobs"][0].is_null());
  EXPECT_TRUE(json["top_logprobs"][0].is_null());
  EXPECT_EQ(json["top_logprobs"][1], Json({{"b", -0.25}, {"\xC3\xA4", -0.5}}));
  EXPECT_NO_THROW(dump(completion_logprobs(tokens, &offset)));
  json = chat_logprobs({tokens[1]});
  EXPECT_EQ(json["content"][0]["bytes"], (Json{0xC3, 0xA4}));
  EXPECT_EQ(json["content"][0]["top_logprobs"][0]["token"], "b");
  json = prompt_logprobs_json(tokens);
  EXPECT_TRUE(json[0].is_null());
  EXPECT_EQ(json[1]["3"]["rank"], 1);
  EXPECT_TRUE(json[1]["2"]["rank"].is_null());
  EXPECT_EQ(json[2]["4"]["rank"], 1);
}

TEST(Reasoning, SplitsAtTheMarkHoweverItIsCut) {
  const std::string text = "<think>so <b> it</think>\n\nanswer </think>";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    for (const bool opened : {false, true}) {
      ReasoningSplitter splitter(true, opened);
      std::string reasoning;
      std::string content;
      for (size_t i = opened ? 7 : 0; i < text.size(); i += piece) {
        const auto part = splitter.feed(text.substr(i, piece));
        reasoning += part.reasoning;
        content += part.content;
      }
      const auto rest = splitter.flush();
      EXPECT_EQ(reasoning + rest.reasoning, "so <b> it");
      EXPECT_EQ(content + rest.content, "answer </think>");
    }
  }
  ReasoningSplitter off(false, true);
  EXPECT_EQ(off.feed("a</think>b").content, "a</think>b");
  ReasoningSplitter unfinished(true, true);
  EXPECT_EQ(unfinished.feed("a</th").reasoning, "a");
  EXPECT_EQ(unfinished.flush().reasoning, "</th");
  EXPECT_TRUE(opens_think_block("x<think>\n"));
  EXPECT_FALSE(opens_think_block("x</think>"));
}

TEST(Metrics, TextFormat) {
  Metrics metrics;
  metrics.first_token(0.05);
  metrics.finished({.scheduled = 0.1,
                    .first_token = 0.2,
                    .last_token = 0.4,
                    .finished = 0.4,
                    .prompt_tokens = 5,
                    .generated_tokens = 3},
                   FinishReason::kStop);
  MetricsScene scene{.prefix = "vllm:", .model_name = "a\"b"};
  scene.counters.kernel_calls["cpu_mha"] = 4;
  const std::string text = metrics.render(scene);
  for (const char* line :
       {"# TYPE vllm:num_requests_running gauge\n",
        "vllm:num_requests_running{model_name=\"a\\\"b\"} 0\n",
        "vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"stop\"} 1\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.04\"} 0\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.06\"} 1\n",
        "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"+Inf\"} 1\n",
        "vllm:e2e_request_latency_seconds_sum{model_name=\"a\\\"b\"} 0.4\n",
        "vllm:request_prompt_tokens_count{model_name=\"a\\\"b\"} 1\n",
        "vllm:lane_rows_total{model_name=\"a\\\"b\",lane=\"sparse_MQA\"} 0\n",
        "vllm:kernel_calls_total{model_name=\"a\\\"b\",kernel=\"cpu_mha\"} 4\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "in\n" << text;
  }
}

}  // namespace
}  // namespace lacuna::server
