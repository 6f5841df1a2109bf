//! The markers around calls in all formats. Which of them a model writes tells little when it is
//! nearly right, so the reader of calls accepts all of them.

/// The markers that begin a block of calls. If one is a prefix of another, the longer one comes
/// first.
pub(super) const OPENS: &[&str] = &[
    "<tool_calls>",
    "<tool_call>",
    "<TOOLCALL>",
    "<minimax:tool_call>",
    "<atem:function_calls>",
    "<seed:tool_call>",
    "<longcat_tool_call>",
    "<function_calls>",
    "<function_call>",
    "<|function_call|>",
    "<tools>",
    "<｜DSML｜function_calls>",
    "<｜DSML｜tool_calls>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls｜>",
    "<｜tool_calls_begin｜>",
    "<｜tool calls begin｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_section_begin|>",
    "<|tool_call>",
    "<|tool_call|>",
    "<|tool_call_start|>",
    "<|python_start|>",
    "<|python_tag|>",
    "<|START_ACTION|>",
    "[TOOL_CALLS]",
    FENCES[0],
    FENCES[1],
];

/// The beginnings of fenced blocks of calls.
pub(super) const FENCES: [&str; 2] = ["```tool_code", "```tool_call"];

/// The end of a fenced block.
pub(super) const FENCE_END: &str = "```";

/// The markers that end a call, or a block of calls.
pub(super) const CLOSES: &[&str] = &[
    "</tool_calls>",
    "</tool_call>",
    "</TOOLCALL>",
    "</minimax:tool_call>",
    "</atem:function_calls>",
    "</atem:invoke>",
    "</seed:tool_call>",
    "</longcat_tool_call>",
    "</function_calls>",
    "</function_call>",
    "</tools>",
    "<|/tool_call|>",
    "</｜DSML｜function_calls>",
    "</｜DSML｜tool_calls>",
    "</｜DSML｜invoke>",
    "</function>",
    "</invoke>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_end|>",
    "<tool_call|>",
    "<|python_end|>",
    "<|END_ACTION|>",
];

/// The beginnings of calls that are written between tags, up to the name of the function.
pub(super) const TAGGED: &[&str] = &[
    "<function=",
    "<function name=",
    "<invoke name=",
    "<invoke=",
    "<｜DSML｜invoke name=",
    "<atem:invoke name=",
];

/// The beginning of a call of Kimi, and the marker before its arguments.
pub(super) const KIMI: [&str; 2] = ["<|tool_call_begin|>", "<|tool_call_argument_begin|>"];

/// The beginning of a call of DeepSeek, and the marker before its arguments.
pub(super) const DEEPSEEK: [&str; 2] = ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"];
