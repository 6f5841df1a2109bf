//! `stolon model inspect`: describes a model without loading it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use stolon::inspect::{HeadMemory, InspectOptions, Inspection, MemoryNeeded, Outline, inspect};
use stolon::{
    EmbeddingConfig, EmbeddingSizes, KvType, ModelError, ModelSource, TextModel, TokenizerSource,
    WeightType, WindowKv,
};

use crate::memory::format_bytes;
use crate::terminal;

/// Exit status for a model that would be refused. 1 is for all other errors and 2 for wrong
/// arguments.
const REFUSED: u8 = 3;
/// Number of lines of the chat template that are shown.
const TEMPLATE_LINES: usize = 20;
/// Maximum number of characters of such a line.
const LINE_CHARS_MAX: usize = 200;

/// Number of labels of a classifier that are shown.
const LABELS_SHOWN: usize = 8;

/// The commands of `stolon model`.
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Describe a model without loading it: sizes, types, memory needed, and why it would be
    /// refused
    ///
    /// Reads only headers and small files, so the values of weights are not checked. Of a model on
    /// the hub that is not in the cache, only the beginning of each file with weights is downloaded.
    /// The exit status is 0 if the model can be loaded, 3 if it would be refused, and 1 if it cannot
    /// be found or read.
    Inspect(InspectArgs),
}

impl ModelCommand {
    /// Runs the command. Returns its exit status.
    ///
    /// # Errors
    /// A model that cannot be found or read.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Inspect(args) => args.run(),
        }
    }
}

/// Arguments of `stolon model inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A model directory, a `.gguf` file (of a model in several files, any of them), or a hub id
    /// (`org/name`, `org/name@revision`, `org/name:Q4_K_M`)
    model: String,
    /// List every tensor with its type, shape and size
    #[arg(long)]
    tensors: bool,
    /// Show the first lines of the chat template; with --json, all of it
    #[arg(long)]
    template: bool,
    /// The GGUF file with the image encoder of a GGUF model (llama.cpp's mmproj), for Gemma 3,
    /// SmolVLM, Idefics 3, Qwen3-VL and Qwen3.5
    #[arg(long, value_name = "FILE")]
    mmproj: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Format of the weight matrices in memory: `stored` (as in the file) or `q8_0`
    #[arg(long, default_value_t, value_name = "FORMAT")]
    weights: WeightType,
    /// Data type of the KV cache: f32, bf16, f16, int8, k8v4 (keys in int8, values in int4) or int4.
    /// Default: f32 for models in f32, else bf16
    #[arg(long, value_name = "TYPE")]
    kv_dtype: Option<KvType>,
    /// Where layers with a sliding window keep keys and values: blocks or states
    #[arg(long, default_value_t, value_name = "PLACE")]
    window_kv: WindowKv,
}

impl InspectArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        let source: ModelSource = self.model.parse()?;
        let mut options = InspectOptions::default();
        (options.weight_type, options.kv_type) = (self.weights, self.kv_dtype);
        options.window_kv = self.window_kv;
        options.load.mmproj.clone_from(&self.mmproj);
        let mut inspection = match inspect(&source, &options) {
            Ok(inspection) => inspection,
            Err(
                error @ (ModelError::Io { .. }
                | ModelError::OutOfMemory { .. }
                | ModelError::UnknownSource { .. }
                | ModelError::Hub { .. }),
            ) => return Err(error.into()),
            // Nothing else is known of a file that is malformed.
            Err(error) => return self.print_refused(&error),
        };
        let tokenizer = tokenizer(&mut inspection);
        match self.json {
            true => terminal::line(self.to_json(&inspection, tokenizer)?)?,
            false => self.print(&inspection, tokenizer)?,
        }
        Ok(status(&inspection.refusals))
    }

    fn print_refused(&self, error: &ModelError) -> anyhow::Result<ExitCode> {
        let refusals = [error.to_string()];
        match self.json {
            true => terminal::line(json!({ "id": self.model, "refusals": refusals }))?,
            false => print_refusals(&refusals)?,
        }
        Ok(status(&refusals))
    }

    fn to_json(&self, inspection: &Inspection, tokenizer: Option<&str>) -> anyhow::Result<Value> {
        let mut object = serde_json::to_value(inspection)?;
        object["tokenizer"] = json!(tokenizer);
        object["has_chat_template"] = json!(template(inspection).is_some());
        if self.template {
            object["chat_template"] = json!(template(inspection));
        }
        let types = types(inspection).into_iter();
        let types = types.map(
            |(name, (count, bytes))| json!({ "dtype": name, "tensors": count, "bytes": bytes }),
        );
        object["types"] = types.collect();
        if !self.tensors {
            object.as_object_mut().map(|members| members.remove("tensors"));
        }
        Ok(object)
    }

    fn print(&self, inspection: &Inspection, tokenizer: Option<&str>) -> anyhow::Result<()> {
        for (name, value) in figures(inspection, tokenizer) {
            terminal::line(format!("{name:<15}{value}"))?;
        }
        let mut rows = vec![["tensors", "count", "size"].map(str::to_owned).to_vec()];
        for (name, (count, bytes)) in types(inspection) {
            rows.push(vec![name, count.to_string(), format_bytes(bytes)]);
        }
        terminal::line(format!("\n{}", terminal::table(&rows).trim_end()))?;
        if let Some(memory) = &inspection.memory {
            terminal::line(format!("\n{}", memory_table(memory, &inspection.outline).trim_end()))?;
        }
        if self.tensors {
            terminal::line("")?;
            for tensor in &inspection.tensors {
                let (dtype, size) = (&tensor.dtype, format_bytes(tensor.bytes));
                let shape: Vec<_> = tensor.shape.iter().map(usize::to_string).collect();
                let shape = format!("[{}]", shape.join(", "));
                terminal::line(format!("{dtype:<8}{shape:<20}{size:>12}  {}", tensor.name))?;
            }
        }
        if self.template
            && let Some(template) = template(inspection)
        {
            terminal::line(format!("\n{}", first_lines(template)))?;
        }
        terminal::line("")?;
        if !inspection.notes.is_empty() {
            terminal::line("Notes:")?;
            for note in &inspection.notes {
                terminal::line(format!("- {note}"))?;
            }
            terminal::line("")?;
        }
        print_refusals(&inspection.refusals)
    }
}

fn print_refusals(refusals: &[String]) -> anyhow::Result<()> {
    if refusals.is_empty() {
        terminal::line("The model can be loaded.")?;
        return Ok(());
    }
    terminal::line("The model would be refused:")?;
    for refusal in refusals {
        terminal::line(format!("- {refusal}"))?;
    }
    Ok(())
}

fn status(refusals: &[String]) -> ExitCode {
    if refusals.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(REFUSED) }
}

/// The file with the model's tokenizer, if it has one. A tokenizer that cannot be used is a reason
/// to refuse the model.
fn tokenizer(inspection: &mut Inspection) -> Option<&'static str> {
    let text = inspection.text.as_ref()?;
    let place = match &text.tokenizer {
        TokenizerSource::Json { .. } => "tokenizer.json",
        TokenizerSource::Gguf(_) => "in the GGUF file",
        _ => return None,
    };
    if let Err(error) = TextModel::new(text, &inspection.eos_token_ids) {
        inspection.refuse(error);
    }
    Some(place)
}

fn template(inspection: &Inspection) -> Option<&str> {
    inspection.text.as_ref()?.chat_template.as_deref()
}

/// Names and values of the known figures.
fn figures(inspection: &Inspection, tokenizer: Option<&str>) -> Vec<(&'static str, String)> {
    let Inspection { id, format, outline, files, .. } = inspection;
    let bytes = files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
    let count = if files.len() == 1 { "1 file".into() } else { format!("{} files", files.len()) };
    let mut figures = vec![
        ("model", id.clone()),
        ("format", format!("{format}, {count}, {}", format_bytes(bytes))),
    ];
    let mut add = |name, value: Option<String>| {
        figures.extend(value.map(|value| (name, value)));
    };
    add("architecture", outline.architecture.clone());
    add("quantization", outline.quantization.clone());
    add("parameters", Some(inspection.parameters.to_string()));
    add("context", outline.context_length.map(|length| format!("{length} tokens")));
    add("vocabulary", outline.vocab_size.map(|size| format!("{size} tokens")));
    add("layers", outline.layers.map(|count| count.to_string()));
    add("hidden size", outline.hidden_size.map(|size| size.to_string()));
    add("heads", outline.heads.map(|count| count.to_string()));
    add("KV heads", outline.kv_heads.map(|count| count.to_string()));
    add("KV layers", outline.kv_layers.map(|count| count.to_string()));
    add("head size", outline.head_dim.map(|size| size.to_string()));
    add("tokenizer", Some(tokenizer.unwrap_or("none: prompts must be token ids").to_owned()));
    let template = template(inspection).map(|text| format!("{} characters", text.chars().count()));
    add("chat template", Some(template.unwrap_or("none".into())));
    add("embeddings", Some(inspection.embedding.as_ref().map_or("none".into(), embeddings)));
    let heads = [
        ("MTP head", inspection.mtp, "--mtp"),
        ("draft head", inspection.draft_head, "--draft-model, with the model it was made for"),
    ];
    for (name, head, option) in heads {
        let Some(HeadMemory { weights, kv_per_token }) = head else { continue };
        let weights = format_bytes(weights);
        figures.push((name, format!("{weights}, {kv_per_token} bytes of KV per token ({option})")));
    }
    if !inspection.tasks.is_empty() {
        figures.push(("tasks", inspection.tasks.join(", ")));
    }
    if let Some(scores) = &inspection.scores {
        let (count, shown) = (scores.labels.len(), scores.labels.iter().take(LABELS_SHOWN));
        let labels = shown.cloned().collect::<Vec<_>>().join(", ");
        let end = if count > LABELS_SHOWN { ", ..." } else { "" };
        figures.push(("scores", format!("of {count} labels: {labels}{end}")));
    }
    figures
}

/// The pooling of embeddings and the sizes to which they can be shortened.
fn embeddings(config: &EmbeddingConfig) -> String {
    let normalized = if config.normalize { ", normalized" } else { "" };
    let sizes = match &config.sizes {
        EmbeddingSizes::Full => String::new(),
        EmbeddingSizes::Any => ", can be shortened".to_owned(),
        EmbeddingSizes::Listed(sizes) => format!(", can be shortened to {sizes:?}"),
    };
    format!("{} pooling{normalized}{sizes}", config.pooling)
}

/// Number and size of the tensors of each type, largest first.
fn types(inspection: &Inspection) -> Vec<(String, (usize, u64))> {
    let mut types = BTreeMap::<&str, (usize, u64)>::new();
    for tensor in &inspection.tensors {
        let (count, bytes) = types.entry(&tensor.dtype).or_default();
        (*count, *bytes) = (*count + 1, bytes.saturating_add(tensor.bytes));
    }
    let mut types: Vec<_> =
        types.into_iter().map(|(name, sizes)| (name.to_owned(), sizes)).collect();
    types.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    types
}

fn memory_table(memory: &MemoryNeeded, outline: &Outline) -> String {
    let context = outline.context_length.unwrap_or_default();
    let row = |name: String, bytes| vec![name, format_bytes(bytes)];
    let windows =
        (memory.windows > 0).then(|| row("windows of a request".to_owned(), memory.windows));
    let tables =
        (memory.tables > 0).then(|| row("--map-embeddings saves".to_owned(), memory.tables));
    let weights =
        [vec!["memory".to_owned(), String::new()], row("weights".to_owned(), memory.weights)];
    let kv = row("KV cache per token".to_owned(), memory.kv_per_token);
    let last = [
        row(format!("KV cache of {context} tokens"), memory.kv_of_context),
        row(
            "weights and this KV cache".to_owned(),
            memory.weights.saturating_add(memory.kv_of_context),
        ),
    ];
    let mut rows: Vec<_> = weights.into_iter().chain(tables).collect();
    // A text encoder has no KV cache.
    if memory.kv_per_token > 0 {
        rows.push(kv);
        rows.extend(windows.into_iter().chain(last));
    }
    terminal::table(&rows)
}

/// The first lines of the template, with control characters escaped.
fn first_lines(template: &str) -> String {
    let shown = |line: &str| -> String {
        let chars = line.chars().take(LINE_CHARS_MAX);
        chars
            .flat_map(|char| match char.is_control() && char != '\t' {
                true => char.escape_default().collect::<Vec<_>>(),
                false => vec![char],
            })
            .collect()
    };
    let mut lines: Vec<_> = template.lines().take(TEMPLATE_LINES).map(shown).collect();
    if template.lines().count() > TEMPLATE_LINES {
        lines.push("...".to_owned());
    }
    lines.join("\n")
}
