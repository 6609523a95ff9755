// Chat templates against renders by Python's jinja2 (chat_golden.json), the choice of a template,
// the limits of the interpreter and DeepSeek-V3.2's encoder.
#include "model/chat_template.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "model/jinja.h"

namespace lacuna {
namespace {

std::string read(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in.good()) << path;
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string source_path(const std::string& path) {
  return std::string(LACUNA_SOURCE_DIR) + "/" + path;
}

OrderedJson golden() {
  return OrderedJson::parse(read(source_path("tests/model/chat_golden.json")));
}

Result<std::string> render(const std::string& source, const OrderedJson& variables,
                           const JinjaLimits& limits = {}) {
  Result<JinjaTemplate> parsed = JinjaTemplate::parse(source, "template");
  return parsed.ok() ? parsed->render(variables, limits) : parsed.status();
}

void expect_case(const OrderedJson& test, const std::string& source, const OrderedJson& variables) {
  SCOPED_TRACE(test["name"].get<std::string>() + ": " + source.substr(0, 400));
  const Result<std::string> text = render(source, variables);
  if (test["expected"].is_null()) {
    ASSERT_FALSE(text.ok()) << *text;
    EXPECT_EQ(text.status().message().find('\n'), std::string::npos);
    EXPECT_EQ(text.status().message().rfind("template line ", 0), 0u) << text.status().message();
  } else {
    ASSERT_TRUE(text.ok()) << text.status().message();
    EXPECT_EQ(*text, test["expected"].get<std::string>());
  }
}

TEST(Jinja, RendersAsPythonDoes) {
  const OrderedJson all = golden();
  int num_cases = 0;
  for (const OrderedJson& test : all["cases"]) {
    const std::string file = test.value("file", "");
    if (file == "data") {
      continue;
    }
    const std::string source =
        file.empty() ? test["source"].get<std::string>() : read(source_path(file));
    expect_case(test, source, test["variables"] == "DATA" ? all["data"] : test["variables"]);
    ++num_cases;
  }
  EXPECT_GT(num_cases, 100);
}

TEST(Jinja, RendersTheDeepseekV3Template) {
  const char* data = std::getenv("LACUNA_DATA_DIR");
  const std::string dir = std::string(data == nullptr ? "" : data) + "/tokenizers/deepseek_v3";
  if (data == nullptr || !std::filesystem::exists(dir + "/tokenizer_config.json")) {
    GTEST_SKIP() << "LACUNA_DATA_DIR names no folder with tokenizers/deepseek_v3";
  }
  const Result<ChatTemplate> chat = ChatTemplate::load(dir, "deepseek_v3");
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  const OrderedJson all = golden();
  for (const OrderedJson& test : all["cases"]) {
    if (test.value("file", "") != "data") {
      continue;
    }
    expect_case(test, chat->source(), test["variables"]);
    const Result<std::string> text = chat->render(
        test["variables"]["messages"].dump(),
        {.add_generation_prompt = test["variables"]["add_generation_prompt"].get<bool>()});
    ASSERT_EQ(text.ok(), !test["expected"].is_null());
    if (text.ok()) {
      EXPECT_EQ(*text, test["expected"].get<std::string>());
    }
  }
}

TEST(Jinja, ErrorsNameTheLine) {
  const auto error = [](const std::string& source) {
    return render(source, OrderedJson::object()).status().message();
  };
  EXPECT_EQ(error("a\n\n{{ raise_exception('say ' ~ 1) }}"), "template line 3: say 1");
  EXPECT_EQ(error("a\n{% if true %}\n{{ x.y }}\n{% endif %}"),
            "template line 3: \"x\" is undefined, so it has no \"y\"");
  EXPECT_EQ(error("\n{% include 'x' %}").rfind("template line 2: the tag {% include %} is not", 0),
            0u);
  EXPECT_EQ(error("{{ 1 | groupby }}"), "template line 1: the filter \"groupby\" is not supported");
  EXPECT_EQ(error("{% set x = 'a' + none %}"), "template line 1: \"+\" between a string and none");
}

TEST(Jinja, HostileTemplatesEnd) {
  const auto fails = [](const std::string& source, const std::string& part) {
    const Result<std::string> text =
        render(source, OrderedJson::object(),
               {.steps = 200'000, .output_bytes = 1 << 20, .total_bytes = 64 << 20});
    ASSERT_FALSE(text.ok()) << source.substr(0, 80);
    EXPECT_NE(text.status().message().find(part), std::string::npos) << text.status().message();
  };
  fails("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "bytes");
  fails("{% set r = range(1000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "steps");
  fails(
      "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
      "{% endfor %}",
      "longer than");
  fails("{{ 'a' * 99999999999 }}", "too long");
  fails("{% set n = namespace(s=[]) %}{% for i in range(999) %}{% set n.s = [n.s] %}{% endfor %}",
        "nested");
  fails(
      "{% set n = namespace(s=['x']) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}"
      "{% endfor %}",
      "larger");
  fails("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "macros are nested");
  fails("{{ 9 ** 9999 }}", "overflow");
  fails("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}", "nested");
  fails("{{ " + std::string(5000, '-') + "1 }}", "nested");
  std::string sum = "{{ 1";
  std::string ifs;
  for (int i = 0; i < 5000; ++i) {
    sum += " + 1";
    ifs += "{% if true %}";
  }
  fails(sum + " }}", "in a row");
  fails(ifs, "nested");
  fails("{% for i in range(99999) %}0123456789012345678901234567890123456789{% endfor %}", "bytes");
  // A namespace that holds itself is freed (the address sanitizer tells).
  EXPECT_TRUE(render("{% set n = namespace() %}{% set n.n = n %}{% set n.l = [n] %}{{ n }}",
                     OrderedJson::object())
                  .ok());
}

TEST(Jinja, KnowsTheDate) {
  const Result<std::string> year = render("{{ strftime_now('%Y') }}", OrderedJson::object());
  ASSERT_TRUE(year.ok());
  EXPECT_EQ(year->size(), 4u);
  EXPECT_EQ(*render("{{ strftime_now('') }}|", OrderedJson::object()), "|");
}

std::string make_dir(const std::string& name) {
  const std::string dir = testing::TempDir() + "lacuna_chat_" + name;
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  return dir;
}

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

TEST(ChatTemplate, TheFirstSourceThatExistsCounts) {
  const std::string dir = make_dir("sources");
  const std::string messages = R"([{"role": "user", "content": "hi"}])";
  const auto shown = [&](const std::string& type, const std::string& given) {
    const Result<ChatTemplate> chat = ChatTemplate::load(dir, type, given);
    if (!chat.ok()) {
      return chat.status().message();
    }
    const Result<std::string> text = chat->render(messages);
    return text.ok() ? *text : text.status().message();
  };
  EXPECT_EQ(shown("glm_moe_dsa", ""),
            dir +
                ": no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give one with --chat-template");
  EXPECT_EQ(shown("deepseek_v32", ""),
            "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>");
  write(dir + "/tokenizer_config.json",
        R"({"bos_token": {"content": "<b>"}, "eos_token": "</e>", "pad_token": null,)"
        R"( "chat_template": "config {{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"})");
  EXPECT_EQ(shown("deepseek_v32", ""), "config <b></e>False");
  write(dir + "/chat_template.jinja", "file {{ messages[0].content }}{{ bos_token }}\n");
  EXPECT_EQ(shown("deepseek_v32", ""), "file hi<b>");
  EXPECT_EQ(shown("", "text {{ messages[0].role }}"), "text user");
  write(dir + "/other", "other {{ add_generation_prompt }}");
  EXPECT_EQ(shown("", dir + "/other"), "other True");
  EXPECT_NE(shown("", dir + "/absent").find("/absent"), std::string::npos);
  EXPECT_EQ(shown("", "a\n{{ 1 + }}"),
            "chat template line 2: expected an expression, found the end of the tag");
}

TEST(ChatTemplate, NamedTemplates) {
  const std::string dir = make_dir("named");
  write(dir + "/tokenizer_config.json",
        R"({"chat_template": [{"name": "default", "template": "plain"},)"
        R"( {"name": "tool_use", "template": "tools {{ tools | length }}"}]})");
  const Result<ChatTemplate> chat = ChatTemplate::load(dir, "");
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  const std::string messages = R"([{"role": "user", "content": "hi"}])";
  EXPECT_EQ(*chat->render(messages), "plain");
  EXPECT_EQ(*chat->render(messages, {.tools_json = R"([{}])"}), "tools 1");
}

ChatTemplate template_of(const std::string& text) {
  Result<ChatTemplate> chat = ChatTemplate::load(make_dir("text"), "", text);
  EXPECT_TRUE(chat.ok()) << chat.status().message();
  return std::move(chat).value();
}

TEST(ChatTemplate, MessagesAreBroughtIntoForm) {
  const ChatTemplate chat =
      template_of("{% for m in messages %}{{ m.content }};{{ m.content is none }} {% endfor %}");
  EXPECT_EQ(*chat.render(R"([{"role": "user", "content": [{"type": "text", "text": "a"},
                            {"type": "text", "text": "b"}]}, {"role": "assistant"}])"),
            "a\nb;False None;True ");
  const auto error = [&](const char* messages, const ChatOptions& options = {}) {
    return chat.render(messages, options).status().message();
  };
  EXPECT_EQ(error("[]"), "messages: expected a list of at least one message");
  EXPECT_EQ(error("{"), "messages: not valid JSON at byte 2");
  EXPECT_EQ(error("[1]"), "messages[0]: expected an object with role and content");
  EXPECT_EQ(error(R"([{"content": "x"}])"), "messages[0].role: missing, expected a text");
  EXPECT_NE(error(R"([{"role": "user", "content": [{"type": "image_url"}]}])").find("text parts"),
            std::string::npos);
  EXPECT_NE(error(R"([{"role": "user", "content": 5}])").find("messages[0].content"),
            std::string::npos);
  EXPECT_EQ(error(R"([{"role": "user"}])", {.tools_json = "{}1"}),
            "tools: not valid JSON at byte 3");
  EXPECT_EQ(error(R"([{"role": "user"}])", {.template_kwargs_json = "[]"}),
            "chat_template_kwargs: expected an object");
  std::string deep =
      R"([{"role": "user", "content": )" + std::string(1000, '[') + std::string(1000, ']') + "}]";
  EXPECT_NE(error(deep.c_str()).find("nested"), std::string::npos);
}

TEST(ChatTemplate, ArgumentsOfCallsTakeTheFormThatTheTemplateNeeds) {
  const std::string text_form = R"([{"role": "assistant", "tool_calls": [{"type": "function",
      "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": \"x\"}"}}]}])";
  const std::string object_form = R"([{"role": "assistant", "tool_calls": [{"type": "function",
      "function": {"name": "f", "arguments": {"b": 1, "a": "x"}}}]}])";
  const ChatTemplate iterates = template_of(
      "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};"
      "{% endfor %}");
  const ChatTemplate adds =
      template_of("{{ 'json ' + messages[0].tool_calls[0].function.arguments }}");
  for (const std::string& form : {text_form, object_form}) {
    EXPECT_EQ(*iterates.render(form), "b=1;a=x;");
    EXPECT_EQ(*adds.render(form), R"(json {"b": 1, "a": "x"})");
  }
}

TEST(ChatTemplate, OptionsAreRead) {
  const Result<ChatOptions> options = parse_chat_options(
      R"({"add_generation_prompt": false, "tools": [{"b": 1, "a": 2}], "ignored": 1,
          "chat_template_kwargs": {"enable_thinking": true}})");
  ASSERT_TRUE(options.ok());
  EXPECT_FALSE(options->add_generation_prompt);
  EXPECT_EQ(options->tools_json, R"([{"b":1,"a":2}])");
  EXPECT_TRUE(parse_chat_options("")->add_generation_prompt);
  EXPECT_FALSE(parse_chat_options(R"({"continue_final_message": true})")->add_generation_prompt);
  EXPECT_EQ(parse_chat_options(R"({"add_generation_prompt": 1})").status().message(),
            "add_generation_prompt: expected true or false");
  EXPECT_FALSE(parse_chat_options("[]").ok());
  const ChatTemplate chat = template_of("{{ enable_thinking }}{{ tools[0].b }}");
  EXPECT_EQ(*chat.render(R"([{"role": "user"}])", *options), "True1");
}

TEST(ChatTemplate, TheFinalMessageMayBeContinued) {
  const ChatTemplate chat =
      template_of("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}");
  const ChatOptions options{.add_generation_prompt = false, .continue_final_message = true};
  EXPECT_EQ(*chat.render(R"([{"role": "user", "content": "2+2"},
                            {"role": "assistant", "content": " The answer is "}])",
                         options),
            "<user>2+2<end><assistant>The answer is");
  EXPECT_FALSE(chat.render(R"([{"role": "user", "content": ""}])", options).ok());
  EXPECT_FALSE(chat.render(R"([{"role": "user", "content": "x"}])",
                           {.add_generation_prompt = true, .continue_final_message = true})
                   .ok());
}

TEST(DeepseekEncoder, TurnsAndThoughts) {
  const Result<ChatTemplate> chat = ChatTemplate::load(make_dir("deepseek"), "deepseek_v32");
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  const std::string messages = R"([{"role": "system", "content": "S"},
      {"role": "user", "content": "1?"},
      {"role": "assistant", "content": "A", "reasoning_content": "dropped"},
      {"role": "user", "content": "2?"}])";
  const std::string begin =
      "<｜begin▁of▁sentence｜>S<｜User｜>1?<｜Assistant｜></think>A<｜end▁of▁sentence｜>"
      "<｜User｜>2?";
  EXPECT_EQ(*chat->render(messages), begin + "<｜Assistant｜></think>");
  EXPECT_EQ(*chat->render(messages, {.template_kwargs_json = R"({"thinking": true})"}),
            begin + "<｜Assistant｜><think>");
  EXPECT_EQ(*chat->render(messages, {.add_generation_prompt = false}), begin);
  EXPECT_FALSE(chat->render(R"([{"role": "judge", "content": ""}])").ok());
}

TEST(DeepseekEncoder, Calls) {
  const Result<ChatTemplate> chat = ChatTemplate::load(make_dir("deepseek"), "deepseek_v32");
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  const std::string messages = R"([{"role": "user", "content": "W?"},
      {"role": "assistant", "content": null, "reasoning_content": "R", "tool_calls": [
        {"function": {"name": "w", "arguments": "{\"city\": \"Ü\", \"n\": [1, 2]}"}},
        {"function": {"name": "t", "arguments": {}}}]},
      {"role": "tool", "content": "21"}, {"role": "tool", "content": "noon"}])";
  const Result<std::string> text =
      chat->render(messages, {.template_kwargs_json = R"({"enable_thinking": true})"});
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text,
            "<｜begin▁of▁sentence｜><｜User｜>W?<｜Assistant｜><think>R</think>\n\n"
            "<｜DSML｜function_calls>\n"
            "<｜DSML｜invoke name=\"w\">\n"
            "<｜DSML｜parameter name=\"city\" string=\"true\">Ü</｜DSML｜parameter>\n"
            "<｜DSML｜parameter name=\"n\" string=\"false\">[1, 2]</｜DSML｜parameter>\n"
            "</｜DSML｜invoke>\n"
            "<｜DSML｜invoke name=\"t\">\n\n"
            "</｜DSML｜invoke>\n"
            "</｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n"
            "<function_results>\n<result>21</result>\n<result>noon</result>\n"
            "</function_results>\n\n<think>");
  const Result<std::string> tools =
      chat->render(R"([{"role": "system", "content": "S"}, {"role": "user", "content": "?"}])",
                   {.tools_json = R"([{"type": "function", "function": {"name": "f"}},
                                      {"type": "function", "function": {"name": "g", "x": 1}}])"});
  ASSERT_TRUE(tools.ok());
  EXPECT_EQ(tools->rfind("<｜begin▁of▁sentence｜>S\n\n## Tools\nYou have access", 0), 0u);
  EXPECT_NE(tools->find("<functions>\n{\"name\": \"f\"}\n{\"name\": \"g\", \"x\": 1}\n"
                        "</functions>\n<｜User｜>?"),
            std::string::npos);
  EXPECT_FALSE(chat->render(R"([{"role": "tool", "content": "x"}])").ok());
}

}  // namespace
}  // namespace lacuna
