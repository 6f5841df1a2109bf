//! Makes the backend and the text layer of the configured model.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;

use stolon_backend::{Backend, Pooling};
use stolon_checkpoint::config::DraftHeadKind;
use stolon_checkpoint::{
    AnyModel, DecoderConfig, DraftHead, EmbeddingConfig, EncoderTask, KvBudget, LoadOptions,
    LoadedEncoder, LoadedModel, LoadedScores, PairForm, ScoreConfig, TextPrompts, VisionConfig,
    Weights,
};
use stolon_cpu::{CpuBackend, CpuOptions, EncoderBackend, Head, at_low_priority};
use stolon_scheduler::EngineConfig;
use stolon_text::{TextSource, TokenizerSource};

use super::draft::{Draft, DraftModel};
use super::rerank::RerankSettings;
use super::{EngineBuilder, ModelArg};
use crate::Error;
use crate::device::GpuOptions;
use crate::drafting::Drafting;
use crate::engine::DefaultSampling;
use crate::images::Images;
use crate::skills::Skills;
use crate::text::{Text, TypedTokens};

/// Makes a backend on the executor thread.
pub(super) type BackendFactory = Box<dyn FnOnce() -> Result<Box<dyn Backend>, Error> + Send>;

/// Positions per KV block, unless the builder says otherwise.
pub(super) const BLOCK_SIZE: usize = 16;
/// Positions per KV block for a model that takes images. No match ends inside an image, so a
/// question about it shares the image's last positions only if they end a block.
const BLOCK_SIZE_WITH_IMAGES: usize = 1;

/// The options of the backend that runs a model.
enum BackendOptions {
    /// With the block size that was requested.
    Cpu(CpuOptions, Option<usize>),
    Gpu(GpuOptions),
}

impl BackendOptions {
    fn yield_while_loading(&self) -> bool {
        matches!(self, Self::Cpu(options, _) if options.yield_while_loading)
    }

    /// Whether the backend can use a model's own head for multi-token prediction.
    fn takes_mtp(&self) -> bool {
        matches!(self, Self::Cpu(..))
    }

    /// Opens a backend of a decoder and, if it computes that, the image encoder of the same model, with
    /// a draft head or a draft model. On a GPU, there is neither.
    fn open(
        self,
        config: DecoderConfig,
        encoder: Option<VisionConfig>,
        weights: Weights,
        (head, draft): (Option<DraftHead>, Option<DraftModel>),
    ) -> Result<Box<dyn Backend>, Error> {
        match self {
            Self::Cpu(options, block_size) => {
                let default = if encoder.is_some() { BLOCK_SIZE_WITH_IMAGES } else { BLOCK_SIZE };
                let block_size = block_size.unwrap_or(default);
                let options = CpuOptions { block_size, ..options };
                let open = |options| CpuBackend::with_head(config, encoder, weights, head, options);
                match draft {
                    Some(draft) => draft.open(options, open),
                    None => Ok(Box::new(open(options)?)),
                }
            }
            Self::Gpu(options) => options.open(config, weights),
        }
    }
}

/// A loaded model, without its backend.
pub(super) struct Loaded {
    pub(super) id: String,
    pub(super) text: Text,
    pub(super) sampling: DefaultSampling,
    pub(super) embedding: Option<EmbeddingConfig>,
    pub(super) generates: bool,
    pub(super) images: Images,
    pub(super) prompts: TextPrompts,
    pub(super) drafting: Drafting,
    /// What is computed from pooled hidden states; `None` if they are the result.
    pub(super) pooled: Option<PooledParts>,
    pub(super) tasks: Tasks,
}

/// What is computed from the pooled hidden states of a text encoder or a classifier.
#[derive(Debug)]
pub(super) struct PooledParts {
    pub(super) is_encoder: bool,
    pub(super) head: Head,
    /// The pooling and the labels of a model that computes scores.
    pub(super) scores: Option<(Pooling, ScoreConfig)>,
}

/// The tasks of an embedding model.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    pub(super) names: Vec<String>,
    /// Whether a text must have one.
    pub(super) required: bool,
    /// The tasks that are adapters, and the directories of these.
    pub(super) adapters: Vec<(String, PathBuf)>,
}

impl EngineBuilder {
    /// Returns the function that makes the backend. It sends the rest of the model to `loaded`.
    pub(super) fn into_factory(
        self,
        config: &EngineConfig,
        loaded: Sender<Loaded>,
    ) -> Result<BackendFactory, Error> {
        if self.backend.is_some() {
            self.refuse_ignored_settings()?;
        }
        if self.text.is_some() && self.chat_template.is_some() {
            let expected = "no value, because a `text_model` has its own templates";
            return Err(Error::invalid("chat_template", expected, "a value"));
        }
        self.check_draft_model(config)?;
        self.check_mtp(config)?;
        let options = self.backend_options(config)?;
        let (own_text, draft) = (self.text, self.draft_model);
        let (mut load_options, template) = (self.load_options, self.chat_template);
        let rerank = self.rerank;
        load_options.max_positions = config.max_positions;
        // Sending fails only if the caller has dropped the future.
        match (self.backend, self.model) {
            (Some((id, make)), _) => {
                let text = own_text.unwrap_or_default();
                let rest = Loaded {
                    id,
                    text: text.clone(),
                    sampling: DefaultSampling::default(),
                    embedding: None,
                    generates: true,
                    images: Images::default(),
                    prompts: TextPrompts::default(),
                    drafting: Drafting::None,
                    pooled: None,
                    tasks: Tasks::default(),
                };
                drop(loaded.send(rest));
                Ok(Box::new(move || while_grammars_are_prepared(&text, make)))
            }
            (None, Some(model)) => Ok(Box::new(move || {
                let (rest, backend) =
                    load((model, draft), &load_options, options, own_text, (template, &rerank))?;
                drop(loaded.send(rest));
                Ok(backend)
            })),
            (None, None) => {
                let got = "neither `model` nor `backend`";
                Err(Error::invalid("model", "a model or a backend", got))
            }
        }
    }

    fn backend_options(&self, config: &EngineConfig) -> Result<BackendOptions, Error> {
        let kv_budget = match (self.num_blocks, self.kv_memory) {
            (Some(blocks), _) => KvBudget::Blocks(blocks),
            (None, Some(bytes)) => KvBudget::Bytes(bytes),
            (None, None) => KvBudget::Auto,
        };
        if let Some(options) = self.device.gpu_options(self, config, kv_budget)? {
            return Ok(BackendOptions::Gpu(options));
        }
        let options = CpuOptions {
            kv_budget,
            kv_type: self.kv_type,
            window_kv: self.window_kv.unwrap_or_default(),
            step_tokens: config.max_batched_tokens,
            threads: self.threads,
            bind_threads: self.bind_threads,
            weight_type: self.weights.unwrap_or_default(),
            map_tables: self.map_embeddings,
            kv_copies: cfg!(feature = "tiers"),
            yield_while_loading: self.yield_while_loading,
            state_slots: config.max_running,
            ..CpuOptions::default()
        };
        Ok(BackendOptions::Cpu(options, self.block_size))
    }

    /// # Errors
    /// [`EngineError::InvalidParameter`] for the first setting that has no effect on a custom
    /// backend.
    fn refuse_ignored_settings(&self) -> Result<(), Error> {
        let ignored = [
            ("model", self.model.is_some()),
            ("kv_memory", self.kv_memory.is_some()),
            ("num_blocks", self.num_blocks.is_some()),
            ("block_size", self.block_size.is_some()),
            ("kv_type", self.kv_type.is_some()),
            ("window_kv", self.window_kv.is_some()),
            ("threads", self.threads.is_some()),
            ("bind_threads", self.bind_threads),
            ("weights", self.weights.is_some()),
            ("map_embeddings", self.map_embeddings),
            ("override_generation_config", self.load_options.generation.is_some()),
            ("mmproj", self.load_options.mmproj.is_some()),
            ("draft_model", self.draft_model.is_some()),
            ("mtp", self.has_mtp()),
            ("image_urls", self.fetch.is_set()),
            ("device", self.device.is_set()),
            ("chat_template", self.chat_template.is_some()),
        ];
        let ignored = ignored.into_iter().find(|(_, is_set)| *is_set).map(|(name, _)| name);
        match ignored.or_else(|| self.rerank.name()) {
            Some(name) => {
                let expected = "no value, because a custom `backend` has its own";
                Err(Error::invalid(name, expected, "a value"))
            }
            None => Ok(()),
        }
    }
}

/// Loads a model, with a draft model if there is one, and builds its backend. Blocks the calling
/// thread. `own_text` replaces the model's tokenizer, and `template` its chat templates. `rerank`
/// makes a language model a reranker.
fn load(
    (model, draft): (ModelArg, Option<ModelArg>),
    load_options: &LoadOptions,
    options: BackendOptions,
    own_text: Option<Text>,
    (template, rerank): (Option<String>, &RerankSettings),
) -> Result<(Loaded, Box<dyn Backend>), Error> {
    let source = model.source()?;
    let read = || stolon_checkpoint::load_any(&source, load_options);
    let model = match if options.yield_while_loading() { at_low_priority(read) } else { read() }? {
        AnyModel::Decoder(model) => *model,
        AnyModel::Encoder(encoder) => {
            super::draft::refuse(draft, "an encoder")?;
            return match rerank.name() {
                None => load_encoder(*encoder, options, own_text),
                Some(name) => {
                    let expected = "no value, because a text encoder answers with no token";
                    Err(Error::invalid(name, expected, "a value"))
                }
            };
        }
    };
    let LoadedModel {
        id,
        config,
        mut weights,
        mut text,
        generation,
        embedding,
        prompts,
        tasks: adapters,
        scores,
        generates,
        images,
        skills,
        has_mtp,
        mtp,
    } = model;
    let tasks = Tasks {
        names: adapters.iter().map(|(name, _)| name.clone()).collect(),
        required: !adapters.is_empty(),
        adapters,
    };
    let is_replaced = template.is_some();
    if let Some(template) = template {
        replace_templates(&mut text, template);
    }
    // llama.cpp's converter writes the template of pairs under this name.
    let named = text.named_templates.iter().find(|(name, _)| name == "rerank");
    let pair_template = rerank.template.clone().or_else(|| Some(named?.1.clone()));
    let mut text = match own_text {
        Some(text) => text,
        None => text_layer(&text, &generation.eos_token_ids, is_replaced)?,
    };
    let scores = rerank.scores(scores, &text, &config, &mut weights)?;
    if !generates {
        super::draft::refuse(draft.clone(), "a model that generates nothing")?;
    }
    let draft = draft.map(|draft| Draft::load(draft, load_options, &text, (&config, &weights)));
    let draft = draft.transpose()?;
    let pooled = match scores {
        Some(LoadedScores { head, config: labels, pairs }) => {
            text = match pairs {
                // Pairs are two texts without types.
                PairForm::Tokenizer => text.with_types(TypedTokens {
                    vocab_size: config.vocab_size,
                    types: 0,
                    lowercase: false,
                }),
                PairForm::Template => text.with_pairs(pair_template.as_deref())?,
            };
            let head = Head::load(&head, &mut weights)?;
            let scores = Some((Pooling::Last, labels));
            Some(PooledParts { is_encoder: false, head, scores })
        }
        None => None,
    };
    // Without the feature, no memory is needed for the encoder.
    let encoder = images.as_ref().filter(|_| cfg!(feature = "images"));
    let encoder = encoder.map(|images| images.encoder.clone());
    let (drafting, draft) = match (draft, mtp) {
        (Some(Draft::Model(model)), _) => (Drafting::DraftModel, (None, Some(model))),
        (Some(Draft::Head(head)), _) => {
            let drafting = match head.kind {
                DraftHeadKind::Gemma4(_) => Drafting::Gemma4Assistant,
                DraftHeadKind::Eagle3(_) => Drafting::Eagle3,
                DraftHeadKind::Mtp => Drafting::Mtp,
            };
            (drafting, (Some(head), None))
        }
        (None, Some(head)) => (Drafting::Mtp, (Some(head), None)),
        (None, None) if has_mtp && options.takes_mtp() => (Drafting::UnusedMtp, (None, None)),
        (None, None) => (Drafting::None, (None, None)),
    };
    let open = || options.open(config, encoder, weights, draft);
    let backend = if generates { while_grammars_are_prepared(&text, open) } else { open() }?;
    text.skills = Skills::new(skills, backend.spec().regions);
    let sampling = DefaultSampling {
        recommended: generation.recommended_sampling(),
        chat: generation.chat_sampling(),
        suppressed: Some(generation.suppressed).filter(|tokens| !tokens.is_empty()).map(Arc::new),
    };
    let images = Images::new(images.as_ref().filter(|_| backend.spec().image_width.is_some()));
    let loaded = Loaded {
        id,
        text,
        sampling,
        embedding,
        generates,
        images,
        prompts,
        drafting,
        pooled,
        tasks,
    };
    Ok((loaded, backend))
}

/// Builds the backend of a text encoder. `own_text` replaces the model's tokenizer.
fn load_encoder(
    model: LoadedEncoder,
    options: BackendOptions,
    own_text: Option<Text>,
) -> Result<(Loaded, Box<dyn Backend>), Error> {
    let LoadedEncoder { id, config, mut weights, text, lowercase, head, task, prompts } = model;
    let options = match options {
        BackendOptions::Cpu(options, _) => options,
        BackendOptions::Gpu(_) => {
            let expected = "`cpu`, because text encoders run on the CPU";
            return Err(Error::invalid("device", expected, "another device"));
        }
    };
    let typed = TypedTokens { vocab_size: config.vocab_size, types: config.token_types, lowercase };
    let text = match own_text {
        Some(text) => text,
        None => text_layer(&text, &[], false)?,
    };
    let text = text.with_types(typed);
    let head = Head::load(&head, &mut weights)?;
    let tasks = config.tasks.as_ref().map_or_else(Tasks::default, |tasks| Tasks {
        names: tasks.names.clone(),
        required: tasks.required,
        adapters: Vec::new(),
    });
    let backend = EncoderBackend::new(config, weights, options)?;
    let (embedding, scores) = match task {
        EncoderTask::Embed(config) => (Some(config), None),
        EncoderTask::Score(pooling, config) => (None, Some((pooling, config))),
    };
    let loaded = Loaded {
        id,
        text,
        sampling: DefaultSampling::default(),
        embedding,
        generates: false,
        images: Images::default(),
        prompts,
        drafting: Drafting::None,
        pooled: Some(PooledParts { is_encoder: true, head, scores }),
        tasks,
    };
    Ok((loaded, Box::new(backend)))
}

/// Opens a backend while another thread prepares the part that all grammars share.
fn while_grammars_are_prepared<T>(text: &Text, open: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let preparing = thread::Builder::new().name("stolon-vocabulary".to_owned());
        // Without a thread, the first grammar prepares it and takes longer.
        let _ = preparing.spawn_scoped(scope, || text.prepare_grammars());
        open()
    })
}

/// Replaces all chat templates of a model.
fn replace_templates(text: &mut TextSource, template: String) {
    text.chat_template = Some(template);
    text.named_templates.clear();
    if let Some(config) = text.tokenizer_config.as_mut().and_then(|config| config.as_object_mut()) {
        config.remove("chat_template");
    }
}

/// The tokenizer and chat templates of a model, if it has a tokenizer and this build supports it.
/// With `needs_template`, a template that is malformed is an error.
pub(super) fn text_layer(
    source: &TextSource,
    eos_token_ids: &[u32],
    needs_template: bool,
) -> Result<Text, Error> {
    if let TokenizerSource::Missing { directory } = &source.tokenizer {
        if needs_template {
            return Err(Error::NoTokenizer);
        }
        let directory = directory.display();
        tracing::warn!("{directory} has no tokenizer.json: prompts must be token ids");
        return Ok(Text::tokens_only(eos_token_ids));
    }
    Text::load(source, eos_token_ids, needs_template)
}
