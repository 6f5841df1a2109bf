//! The fixtures have the patterns of the published models that `fixtures/published.json` lists, so
//! that a fault which depends on a pattern shows.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::Value;
use stolon_checkpoint::{
    Architecture, DecoderConfig, LayerConfig, MixerKind, MlpKind, Multipliers,
};

use super::fixture;

/// A published model and the fixture that stands for it.
#[derive(Deserialize)]
struct Published {
    /// The name of the model on the Hugging Face hub.
    model: String,
    /// The name of the fixture.
    fixture: String,
    /// The names of the properties that the fixture does not share with the model. Other fixtures
    /// have them.
    #[serde(default)]
    differs: BTreeSet<String>,
    /// The number of parameters that transformers gives a model with this configuration, without an
    /// image encoder. Missing for models that transformers does not have.
    parameters: Option<usize>,
    /// The keys of the model's `config.json` that say what the decoder computes.
    config: Value,
}

impl Published {
    fn all() -> Vec<Self> {
        let file = fixture::directory("published.json");
        let text = std::fs::read(file).expect("the list of published models");
        serde_json::from_slice(&text).expect("a list of published models")
    }

    fn decoder(&self) -> DecoderConfig {
        let decoder = DecoderConfig::from_json("config.json", &self.config);
        decoder.unwrap_or_else(|error| panic!("{}: {error}", self.model))
    }
}

/// What a layer consists of, as the legend in `fixtures/README.md` says.
fn kind(layer: &LayerConfig) -> String {
    let mut kind = String::new();
    for mixer in layer.mixers {
        kind.push(match mixer {
            MixerKind::Attention if layer.sliding_window.is_some() => 'W',
            MixerKind::Attention => 'A',
            MixerKind::Convolution => 'C',
            MixerKind::DeltaNet => 'D',
            MixerKind::Mamba2 => 'M',
            MixerKind::Latent => 'L',
        });
    }
    let properties = [
        ('n', layer.has_attention() && layer.rope.is_none()),
        ('h', layer.heads.is_some()),
        ('s', layer.kv_source.is_some()),
        ('k', layer.values_from_keys),
        ('w', layer.intermediate_size.is_some()),
        ('d', layer.mlp == Some(MlpKind::Dense)),
        ('e', layer.mlp == Some(MlpKind::Experts)),
        ('b', layer.mlp == Some(MlpKind::DenseAndExperts)),
    ];
    kind.extend(properties.iter().filter(|(_, has)| *has).map(|(letter, _)| letter));
    kind
}

fn kinds(config: &DecoderConfig) -> Vec<String> {
    config.layers.iter().map(kind).collect()
}

/// Maximum number of layers that [`pattern`] looks for as one that is repeated.
const PERIOD_MAX: usize = 10;

/// The kinds of all layers, with those that are repeated in parentheses.
fn pattern(kinds: &[String]) -> String {
    let mut parts = Vec::new();
    let mut rest = kinds;
    while !rest.is_empty() {
        let repeats = |period: usize| {
            rest.chunks_exact(period).take_while(|chunk| **chunk == rest[..period]).count()
        };
        let periods = (1..=PERIOD_MAX).filter(|period| repeats(*period) > 1);
        // The first one of equally long ones.
        let longest = periods.rev().max_by_key(|period| period * repeats(*period));
        let (period, count) = longest.map_or((1, 1), |period| (period, repeats(period)));
        let repeated = rest[..period].join(" ");
        parts.push(if count > 1 { format!("{count} x ({repeated})") } else { repeated });
        rest = &rest[period * count..];
    }
    parts.join(" ")
}

/// 1, odd or even, as kernels may distinguish the numbers of heads that share something.
fn parity(count: usize) -> &'static str {
    match count {
        1 => "1",
        _ if count.is_multiple_of(2) => "even",
        _ => "odd",
    }
}

/// The first word of what `{:?}` writes: the name of a variant.
fn variant(value: &impl std::fmt::Debug) -> String {
    let text = format!("{value:?}");
    text.split([' ', '(', '{']).next().expect("a word").to_owned()
}

/// The properties that depend on the number and on the width of attention's heads.
fn heads(config: &DecoderConfig) -> [(&'static str, String); 2] {
    let several = if config.num_kv_heads == 1 { "one KV head" } else { "several KV heads" };
    let group = parity(config.num_heads / config.num_kv_heads);
    let own = config.layers.iter().filter_map(|layer| layer.heads);
    let own: BTreeSet<_> = own.map(|own| parity(config.num_heads / own.kv_heads)).collect();
    let width = (config.num_heads * config.head_dim).cmp(&config.hidden_size);
    let width = if config.latent.is_some() { String::new() } else { format!("{width:?}") };
    [("groups", format!("{group}, {several}, {own:?}")), ("width", width)]
}

/// The names of all factors that are not 1.
fn factors(config: &DecoderConfig) -> String {
    let own = |factors: &Multipliers| {
        let Multipliers { attention_output, mamba_output, mamba_inputs, mlp_gate, mlp_output } =
            *factors;
        let single = [attention_output, mamba_output, mlp_gate, mlp_output];
        [&single[..], &mamba_inputs].concat().iter().map(|factor| *factor != 1.0).collect()
    };
    let own: Option<Vec<bool>> = config.multipliers.as_ref().map(own);
    let factors = [
        ("embedding", config.embedding_scale.is_some()),
        ("residual", config.residual_scale.is_some()),
        ("logits", config.logit_scale.is_some()),
        ("queries", config.query_scaling.is_some()),
        ("cap of scores", config.attention_softcap.is_some()),
        ("cap of logits", config.logit_softcap.is_some()),
    ];
    let names: Vec<_> = factors.iter().filter(|(_, has)| *has).map(|(name, _)| name).collect();
    format!("{names:?} {own:?}")
}

/// The rotary embeddings that layers use.
fn ropes(config: &DecoderConfig) -> String {
    let used: BTreeSet<_> = config.layers.iter().filter_map(|layer| layer.rope).collect();
    let rope = |index: usize| {
        let rope = &config.ropes[index];
        format!(
            "{} {}",
            variant(&rope.scaling),
            if rope.sections.is_some() { "sections" } else { "" }
        )
    };
    let part = config.latent.is_none() && config.rotary_dim() != config.head_dim;
    let ropes: Vec<_> = used.into_iter().map(rope).collect();
    format!("{ropes:?} {}", if part { "of a part of each head" } else { "" })
}

fn experts(config: &DecoderConfig) -> String {
    let Some(experts) = &config.experts else { return String::new() };
    let groups = experts.groups.map(|groups| groups.best);
    let shared = (experts.shared_width.is_some(), experts.shared_gate);
    let scaled = (experts.scale != 1.0, experts.scaled_router, experts.shifted);
    let sums = (experts.normalized, experts.router_bias, experts.per_token == 1);
    format!("{:?} {groups:?} {shared:?} {scaled:?} {sums:?}", experts.scores)
}

fn recurrent(config: &DecoderConfig) -> String {
    let delta_net = config.delta_net.map(|sizes| {
        (variant(&sizes.kind), parity(sizes.value_heads / sizes.key_heads), sizes.taps)
    });
    let mamba2 = config.mamba2.map(|sizes| {
        let groups = if sizes.groups == 1 { "one group" } else { "groups" };
        (groups, parity(sizes.heads / sizes.groups), sizes.norm, sizes.convolution_bias)
    });
    let convolution = config.convolution_taps;
    let low_rank = config.latent.map(|latent| latent.query_rank.is_some());
    format!("{delta_net:?} {mamba2:?} {convolution:?} {low_rank:?}")
}

/// The properties of a model that a fixture has to share with it, by name.
fn properties(config: &DecoderConfig) -> BTreeMap<&'static str, String> {
    let biases = [config.qkv_bias, config.output_bias, config.mlp_bias, config.head_bias];
    let norms = (config.norms, config.norm_kind, config.qk_norm, config.value_norm);
    let parts = [
        config.per_layer_input.is_some(),
        config.layer_scales,
        config.output_gate,
        config.mlp_gate,
        config.attention_sinks,
        config.selective_attention,
    ];
    let mut properties = BTreeMap::from([
        ("tie", config.tie_word_embeddings.to_string()),
        ("biases", format!("{biases:?}")),
        ("norms", format!("{norms:?}, offset {}", config.norm_offset)),
        ("parts", format!("{parts:?}, {}", variant(&config.activation))),
        ("factors", factors(config)),
        ("rope", ropes(config)),
        ("experts", experts(config)),
        ("recurrent", recurrent(config)),
    ]);
    properties.extend(heads(config));
    properties
}

/// Goal: published configurations are read as transformers reads them, at least as far as the number
/// of parameters depends on them.
#[test]
fn published_models_have_the_parameters_of_transformers() {
    let mut wrong = String::new();
    for published in Published::all() {
        let decoder = published.decoder();
        let tensors = decoder.tensors();
        let own: usize = tensors.iter().map(|spec| spec.shape.iter().product::<usize>()).sum();
        let Some(expected) = published.parameters else { continue };
        if own != expected {
            writeln!(wrong, "{}: {own} parameters, expected {expected}", published.model)
                .expect("a string");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Pairs of successive layers.
fn pairs(kinds: &[String]) -> BTreeSet<(&String, &String)> {
    kinds.iter().zip(kinds.iter().skip(1)).collect()
}

/// Goal: the fixture of each published model has layers of the same kinds, of which the first and
/// the last one are the same and each one follows the same kinds, and shares all other properties
/// except those that the list names, which other fixtures have. All architectures are in the list.
#[test]
fn fixtures_have_published_patterns() {
    let fixtures: BTreeMap<_, _> = fixture::names()
        .into_iter()
        .map(|name| (name.clone(), fixture::model(&name).config))
        .collect();
    let mut missing: BTreeSet<_> = Architecture::all().map(Architecture::name).collect();
    let mut wrong = String::new();
    let elsewhere = |name: &str, value: &str| {
        fixtures.values().any(|config| properties(config).get(name).is_some_and(|own| own == value))
    };
    for published in Published::all() {
        let model = &published.model;
        let decoder = published.decoder();
        let own = &fixtures[&published.fixture];
        assert_eq!(own.architecture, decoder.architecture, "{model}");
        missing.remove(decoder.architecture.name());
        let (layers, own_layers) = (kinds(&decoder), kinds(own));
        let same_ends = layers.first() == own_layers.first() && layers.last() == own_layers.last();
        let absent: Vec<_> = pairs(&layers).difference(&pairs(&own_layers)).copied().collect();
        if !same_ends || !absent.is_empty() {
            let (theirs, ours) = (pattern(&layers), pattern(&own_layers));
            writeln!(wrong, "{model}: layers {theirs}, fixture {ours}, without {absent:?}")
                .expect("a string");
        }
        let own = properties(own);
        let differing = properties(&decoder);
        let differing: BTreeMap<_, _> =
            differing.into_iter().filter(|(name, value)| own[name] != *value).collect();
        if differing.keys().map(ToString::to_string).collect::<BTreeSet<_>>() != published.differs {
            writeln!(wrong, "{model}: {differing:?}, fixture {own:?}").expect("a string");
        }
        for (name, value) in differing {
            if !elsewhere(name, &value) {
                writeln!(wrong, "{model}: no fixture has {name} {value}").expect("a string");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(missing.is_empty(), "no published model has the architectures {missing:?}");
}

/// Goal: the table in `fixtures/README.md` shows the patterns as they are.
#[test]
fn the_table_of_patterns_is_right() {
    let readme = std::fs::read_to_string(fixture::directory("README.md")).expect("a text");
    let mut table = String::new();
    for published in Published::all() {
        let layers = pattern(&kinds(&published.decoder()));
        let own = pattern(&kinds(&fixture::model(&published.fixture).config));
        let differs: Vec<_> = published.differs.iter().map(String::as_str).collect();
        let (model, fixture) = (&published.model, &published.fixture);
        writeln!(table, "| {model} | {layers} | {fixture} | {own} | {} |", differs.join(", "))
            .expect("a string");
    }
    assert!(readme.contains(&table), "the table in fixtures/README.md has to be:\n{table}");
}

/// The safetensors files with weights in `directory` and in all directories in it.
fn weight_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() {
            weight_files(&path, files);
        } else if name.ends_with(".safetensors")
            && !["expected.safetensors", "images.safetensors"].contains(&&*name)
        {
            files.push(path);
        }
    }
}

/// Goal: no weight of a fixture is constant, such as norms of 1 and biases of 0, and no single
/// number is 0 or 1. Otherwise, a wrong one would not show.
#[test]
fn no_weight_is_constant() {
    let mut files = Vec::new();
    weight_files(&fixture::directory(""), &mut files);
    assert!(files.len() > 60, "{files:?}");
    for path in files {
        let bytes = std::fs::read(&path).expect("a file");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        for (name, view) in file.tensors() {
            let values: Vec<_> = match view.dtype() {
                Dtype::F32 => view.data().chunks_exact(4).collect(),
                Dtype::F16 | Dtype::BF16 => view.data().chunks_exact(2).collect(),
                _ => continue,
            };
            let is_constant = match values[..] {
                [one] => one.ends_with(&[0x80, 0x3f]) || one.iter().all(|byte| *byte == 0),
                [first, ..] => values.iter().all(|value| *value == first),
                [] => false,
            };
            assert!(!is_constant, "{}: {name} is constant", path.display());
        }
    }
}
