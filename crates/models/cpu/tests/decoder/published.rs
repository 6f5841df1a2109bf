//! The fixtures have the patterns of the published models that `fixtures/published.json` lists, so
//! that a fault which depends on a pattern shows.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::Value;
use stolon_checkpoint::config::{KeysAndValues, NormsConfig};
use stolon_checkpoint::{
    Activation, Architecture, AttentionConfig, DecoderConfig, FeedForwardConfig, LayerConfig,
    MixerConfig,
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
fn kind(config: &DecoderConfig, layer: &LayerConfig) -> String {
    let mut kind = String::new();
    for mixer in &layer.mixers {
        kind.push(match mixer {
            MixerConfig::Attention(attention) if attention.sliding_window.is_some() => 'W',
            MixerConfig::Attention(_) => 'A',
            MixerConfig::Convolution(_) => 'C',
            MixerConfig::DeltaNet(_) => 'D',
            MixerConfig::Mamba2(_) => 'M',
            MixerConfig::Latent(_) => 'L',
        });
    }
    let attention = layer.attention();
    let has_keys = |is: fn(&KeysAndValues) -> bool| {
        attention.is_some_and(|attention| is(&attention.keys_and_values))
    };
    let own = |attention: &&AttentionConfig| heads_of(attention) != usual_heads(config);
    let width = layer.mlp.as_ref().and_then(FeedForwardConfig::dense).map(|mlp| mlp.width);
    let properties = [
        ('n', layer.has_attention() && layer.rope().is_none()),
        ('h', attention.filter(own).is_some()),
        ('s', has_keys(|keys| matches!(keys, KeysAndValues::OfLayer(_)))),
        ('k', has_keys(|keys| *keys == KeysAndValues::OneMatrix)),
        ('w', width.is_some() && width != dense_width(config)),
        ('d', matches!(layer.mlp, Some(FeedForwardConfig::Dense(_)))),
        ('e', matches!(layer.mlp, Some(FeedForwardConfig::Experts(_)))),
        ('b', matches!(layer.mlp, Some(FeedForwardConfig::DenseAndExperts(..)))),
    ];
    kind.extend(properties.iter().filter(|(_, has)| *has).map(|(letter, _)| letter));
    kind
}

/// The numbers of query heads and of KV heads, and the length of a head.
fn heads_of(attention: &AttentionConfig) -> [usize; 3] {
    [attention.heads, attention.kv_heads, attention.head_dim]
}

/// These numbers in the first layer with a window, or else in the first one with attention. Latent
/// attention has one KV head.
fn usual_heads(config: &DecoderConfig) -> [usize; 3] {
    if let Some(latent) = config.latent() {
        return [latent.heads, 1, latent.sizes.kept_dim()];
    }
    let all = || config.layers.iter().filter_map(LayerConfig::attention);
    let local = all().find(|attention| attention.sliding_window.is_some());
    local.or_else(|| all().next()).map_or([1; 3], heads_of)
}

/// The width of the first MLP for all tokens, if there is one.
fn dense_width(config: &DecoderConfig) -> Option<usize> {
    let mut mlps = config.layers.iter().filter_map(|layer| layer.mlp.as_ref()?.dense());
    mlps.next().map(|mlp| mlp.width)
}

fn kinds(config: &DecoderConfig) -> Vec<String> {
    config.layers.iter().map(|layer| kind(config, layer)).collect()
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
    let [heads, kv_heads, head_dim] = usual_heads(config);
    let several = if kv_heads == 1 { "one KV head" } else { "several KV heads" };
    let group = parity(heads / kv_heads);
    let all = config.layers.iter().filter_map(LayerConfig::attention).map(heads_of);
    let own = all.filter(|own| *own != usual_heads(config));
    let own: BTreeSet<_> = own.map(|[heads, kv_heads, _]| parity(heads / kv_heads)).collect();
    let width = (heads * head_dim).cmp(&config.hidden_size);
    let width = if config.latent().is_some() { String::new() } else { format!("{width:?}") };
    [("groups", format!("{group}, {several}, {own:?}")), ("width", width)]
}

/// The names of all factors that are not 1.
fn factors(config: &DecoderConfig) -> String {
    let attention = config.attention();
    let mlp = config.layers.iter().find_map(|layer| layer.mlp.as_ref()?.dense());
    let gate = mlp.map(|mlp| match mlp.activation {
        Activation::Gated(gate) => gate.factor,
        Activation::Plain(_) => 1.0,
    });
    let single = [
        attention.map(|attention| attention.output_factor),
        config.mamba2().map(|mamba2| mamba2.output_factor),
        gate,
        mlp.map(|mlp| mlp.output_factor),
    ];
    let inputs = config.mamba2().map_or([1.0; 5], |mamba2| mamba2.input_factors);
    let all = single.map(|factor| factor.unwrap_or(1.0)).into_iter().chain(inputs);
    let own: Vec<bool> = all.map(|factor| factor != 1.0).collect();
    let latent_scaling = config.latent().and_then(|latent| latent.query_scaling);
    let scaling = attention.and_then(|attention| attention.query_scaling).or(latent_scaling);
    let softcap = attention.and_then(|attention| attention.softcap);
    let factors = [
        ("embedding", config.embedding_scale.is_some()),
        ("residual", config.residual_scale.is_some()),
        ("logits", config.logit_scale.is_some()),
        ("queries", scaling.is_some()),
        ("cap of scores", softcap.is_some()),
        ("cap of logits", config.logit_softcap.is_some()),
    ];
    let names: Vec<_> = factors.iter().filter(|(_, has)| *has).map(|(name, _)| name).collect();
    format!("{names:?} {own:?}")
}

/// The rotary embeddings that layers use.
fn ropes(config: &DecoderConfig) -> String {
    let used: BTreeSet<_> = config.layers.iter().filter_map(LayerConfig::rope).collect();
    let rope = |index: usize| {
        let rope = &config.ropes[index];
        format!(
            "{} {}",
            variant(&rope.scaling),
            if rope.sections.is_some() { "sections" } else { "" }
        )
    };
    let part =
        config.attention().is_some_and(|attention| attention.rotary_dim != attention.head_dim);
    let ropes: Vec<_> = used.into_iter().map(rope).collect();
    format!("{ropes:?} {}", if part { "of a part of each head" } else { "" })
}

fn experts(config: &DecoderConfig) -> String {
    let Some(experts) = config.experts() else { return String::new() };
    let groups = experts.groups.map(|groups| groups.best);
    let shared = (experts.shared_width.is_some(), experts.shared_gate);
    let scaled = (experts.scale != 1.0, experts.scaled_router, experts.shifted);
    let sums = (experts.normalized, experts.router_bias, experts.per_token == 1);
    format!("{:?} {groups:?} {shared:?} {scaled:?} {sums:?}", experts.scores)
}

fn recurrent(config: &DecoderConfig) -> String {
    let delta_net = config.delta_net().map(|sizes| {
        (variant(&sizes.kind), parity(sizes.value_heads / sizes.key_heads), sizes.taps)
    });
    let mamba2 = config.mamba2().map(|sizes| {
        let groups = if sizes.groups == 1 { "one group" } else { "groups" };
        (groups, parity(sizes.heads / sizes.groups), sizes.norm, sizes.convolution_bias)
    });
    let convolution = config.convolution().map(|convolution| convolution.taps);
    let low_rank = config.latent().map(|latent| latent.sizes.query_rank.is_some());
    format!("{delta_net:?} {mamba2:?} {convolution:?} {low_rank:?}")
}

/// The properties of a model that a fixture has to share with it, by name.
fn properties(config: &DecoderConfig) -> BTreeMap<&'static str, String> {
    let attention = config.attention();
    let has = |part: fn(&AttentionConfig) -> bool| attention.is_some_and(part);
    let activations = config.layers.iter().filter_map(|layer| {
        let own = layer.mlp.as_ref()?.dense().map(|mlp| (mlp.activation, mlp.bias));
        own.or_else(|| layer.experts().map(|experts| (experts.activation, experts.bias)))
    });
    let (activation, mlp_bias) = activations.into_iter().next().expect("an MLP or experts");
    let (function, mlp_gate) = match activation {
        Activation::Gated(gate) => (variant(&gate.function), true),
        Activation::Plain(function) => (variant(&function), false),
    };
    let biases = [
        has(|attention| attention.qkv_bias),
        has(|attention| attention.output_bias),
        mlp_bias,
        config.head_bias,
    ];
    let qk_norm = attention.and_then(|attention| attention.qk_norm);
    let value_norm = has(|attention| attention.value_norm);
    let NormsConfig { placement, kind, eps, output_eps, offset, plain_final, embedding } =
        config.norms;
    let norms = (placement, kind, qk_norm, value_norm);
    let more = (eps == output_eps, plain_final, embedding);
    let parts = [
        config.per_layer_input.is_some(),
        config.layer_scales,
        has(|attention| attention.output_gate),
        mlp_gate,
        has(|attention| attention.sinks),
        has(|attention| attention.selective),
    ];
    let mut properties = BTreeMap::from([
        ("tie", config.tie_word_embeddings.to_string()),
        ("biases", format!("{biases:?}")),
        ("norms", format!("{norms:?}, offset {offset}, {more:?}")),
        ("parts", format!("{parts:?}, {function}")),
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
