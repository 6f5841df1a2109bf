//! The weights of an image encoder: the names, shapes and kinds of all tensors.

use super::{ProjectorConfig, RegionConfig, VisionConfig};
use crate::config::{LinearWeights, NormKind, NormWeights, TensorRole, TensorSpec};

/// A layer norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerNormWeights {
    /// The weight, `[hidden_size]`.
    pub weight: TensorSpec,
    /// The bias, `[hidden_size]`.
    pub bias: TensorSpec,
}

/// The weights of one layer of the tower, in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisionLayerWeights {
    /// The norm before attention.
    pub attention_norm: LayerNormWeights,
    /// The projections to queries, keys and values.
    pub qkv: [LinearWeights; 3],
    /// The output projection of attention.
    pub output: LinearWeights,
    /// The norm before the MLP.
    pub mlp_norm: LayerNormWeights,
    /// The first projection of the MLP.
    pub up: LinearWeights,
    /// The second projection of the MLP.
    pub down: LinearWeights,
}

/// The weights of a projector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProjectorWeights {
    /// The projection of concatenated features, `[output_size, factor^2 * hidden_size]`.
    PixelShuffle(TensorSpec),
    /// The mean over squares of patches, normalized and projected (Gemma 3).
    AveragePooling {
        /// The weight of an RMS norm.
        norm: TensorSpec,
        /// The projection, which is transposed, unlike other matrices: `[hidden_size,
        /// output_size]`.
        projection: TensorSpec,
    },
    /// The two projections of an MLP, `[inner_size, 2 * hidden_size]` and
    /// `[output_size, inner_size]`.
    Tiles(Box<[LinearWeights; 2]>),
    /// MLPs over squares of patches, for several layers of the tower (Qwen3-VL).
    Merger {
        /// The MLP after the tower's last layer. Its norm is [`VisionWeights::final_norm`].
        mlp: Box<[LinearWeights; 2]>,
        /// The projectors after earlier layers.
        deepstack: Vec<MergerWeights>,
    },
}

/// The weights of a projector after a layer other than the last one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergerWeights {
    /// The norm of the concatenated features, `[factor^2 * hidden_size]`.
    pub norm: LayerNormWeights,
    /// The MLP, `[factor^2 * hidden_size, factor^2 * hidden_size]` and `[output_size, factor^2 *
    /// hidden_size]`.
    pub mlp: [LinearWeights; 2],
}

/// The weights of coordinates and sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct RegionWeights {
    /// The norm of the residual stream before the bins are computed; `None` if MLPs compute them.
    pub norm: Option<NormWeights>,
    /// The weights of coordinates, which are one number.
    pub coordinates: ValueWeights,
    /// The weights of sizes, which are two numbers. The bins of widths are followed by the bins of
    /// heights.
    pub sizes: ValueWeights,
}

/// The weights of one kind of values: coordinates or sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueWeights {
    /// The frequencies of the Fourier features, `[numbers, features / 2]`.
    pub frequencies: TensorSpec,
    /// The projection of the features to an embedding, `[output_size, features]`.
    pub encoder: LinearWeights,
    /// The first projection of the MLP that computes the bins, `[inner_size, output_size]`, if it
    /// is an MLP.
    pub inner: Option<LinearWeights>,
    /// The projection to the bins, `[bins, inner_size]`, or `[bins, output_size]` without an MLP.
    pub bins: LinearWeights,
}

/// All weights of an encoder, in the order of the forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisionWeights {
    /// The projection of patches, `[hidden_size, 3 * frames * patch_size^2]`. In files, it is the
    /// kernel of a convolution.
    pub patches: LinearWeights,
    /// The learned positions, `[grid^2, hidden_size]`, which are added to the features of patches.
    pub positions: TensorSpec,
    /// The layers of the tower.
    pub layers: Vec<VisionLayerWeights>,
    /// The norm after the last layer.
    pub final_norm: LayerNormWeights,
    /// The projector from the features of patches to rows of the decoder.
    pub projector: ProjectorWeights,
}

impl VisionConfig {
    /// All weights that the encoder has.
    pub fn weights(&self) -> VisionWeights {
        let tower = &self.tower;
        let hidden = tower.hidden_size;
        let at = |part: &str| format!("{}{part}", tower.prefix);
        let patch = 3 * tower.frames * tower.patch_size * tower.patch_size;
        VisionWeights {
            patches: linear(&at("embeddings.patch_embedding"), [hidden, patch]),
            positions: TensorSpec {
                name: at("embeddings.position_embedding.weight"),
                shape: vec![tower.grid() * tower.grid(), hidden],
                role: TensorRole::Bias,
            },
            layers: (0..tower.layers).map(|index| self.layer_weights(index)).collect(),
            final_norm: norm(&at("post_layernorm"), hidden),
            projector: self.projector_weights(),
        }
    }

    fn layer_weights(&self, index: usize) -> VisionLayerWeights {
        let (hidden, inner) = (self.tower.hidden_size, self.tower.intermediate_size);
        let at = |part: &str| format!("{}encoder.layers.{index}.{part}", self.tower.prefix);
        let square = |part: &str| linear(&at(part), [hidden, hidden]);
        VisionLayerWeights {
            attention_norm: norm(&at("layer_norm1"), hidden),
            qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].map(square),
            output: square("self_attn.out_proj"),
            mlp_norm: norm(&at("layer_norm2"), hidden),
            up: linear(&at("mlp.fc1"), [inner, hidden]),
            down: linear(&at("mlp.fc2"), [hidden, inner]),
        }
    }

    fn projector_weights(&self) -> ProjectorWeights {
        let hidden = self.tower.hidden_size;
        let matrix = |name: &str, shape: [usize; 2]| TensorSpec {
            name: name.to_owned(),
            shape: shape.into(),
            role: TensorRole::Matrix,
        };
        match &self.projector {
            ProjectorConfig::PixelShuffle { factor } => ProjectorWeights::PixelShuffle(matrix(
                "model.connector.modality_projection.proj.weight",
                [self.output_size, factor * factor * hidden],
            )),
            ProjectorConfig::AveragePooling { .. } => ProjectorWeights::AveragePooling {
                norm: TensorSpec {
                    name: "model.multi_modal_projector.mm_soft_emb_norm.weight".to_owned(),
                    shape: vec![hidden],
                    role: TensorRole::Norm,
                },
                projection: matrix(
                    "model.multi_modal_projector.mm_input_projection_weight",
                    [hidden, self.output_size],
                ),
            },
            ProjectorConfig::Tiles { inner_size, .. } => ProjectorWeights::Tiles(Box::new([
                linear("model.vision.proj_mlp.fc1", [*inner_size, 2 * hidden]),
                linear("model.vision.proj_mlp.fc2", [self.output_size, *inner_size]),
            ])),
            ProjectorConfig::Merger { factor, deepstack } => self.mergers(*factor, deepstack.len()),
        }
    }

    /// The weights of the projectors of squares of `factor` x `factor` patches: one after the last
    /// layer, and `deepstack` after earlier layers.
    fn mergers(&self, factor: usize, deepstack: usize) -> ProjectorWeights {
        let width = factor * factor * self.tower.hidden_size;
        let at = |module: &str| format!("{}{module}", self.tower.prefix);
        let mlp = |module: &str| {
            [("linear_fc1", width), ("linear_fc2", self.output_size)]
                .map(|(part, rows)| linear(&at(&format!("{module}.{part}")), [rows, width]))
        };
        let merger = |index| {
            let module = format!("deepstack_merger_list.{index}");
            MergerWeights { norm: norm(&at(&format!("{module}.norm")), width), mlp: mlp(&module) }
        };
        ProjectorWeights::Merger {
            mlp: Box::new(mlp("merger")),
            deepstack: (0..deepstack).map(merger).collect(),
        }
    }

    /// The weights of coordinates and sizes, if the model has them as tokens.
    pub fn region_weights(&self) -> Option<RegionWeights> {
        let regions = self.regions?;
        let width = self.output_size;
        let at = |part: String| format!("model.region.{part}");
        let values = |name: &str, [numbers, features, bins]: [usize; 3]| {
            let decoder = |part: &str, shape| linear(&at(format!("{name}_decoder{part}")), shape);
            ValueWeights {
                frequencies: TensorSpec {
                    name: at(format!("{name}_features")),
                    shape: vec![numbers, features / 2],
                    role: TensorRole::Bias,
                },
                encoder: linear(&at(format!("{name}_encoder")), [width, features]),
                inner: regions.inner_size.map(|inner| decoder(".fc1", [inner, width])),
                bins: match regions.inner_size {
                    Some(inner) => decoder(".fc2", [bins, inner]),
                    None => decoder("", [bins, width]),
                },
            }
        };
        let RegionConfig { coordinate_bins, size_bins, .. } = regions;
        Some(RegionWeights {
            norm: regions.inner_size.is_none().then(|| {
                let LayerNormWeights { weight, bias } = norm(&at("ln".to_owned()), width);
                NormWeights {
                    kind: NormKind::Layer,
                    eps: self.tower.norm_eps,
                    offset: 0.0,
                    weight,
                    bias: Some(bias),
                }
            }),
            coordinates: values("coord", [1, regions.coordinate_features, coordinate_bins]),
            sizes: values("size", [2, regions.size_features, 2 * size_bins]),
        })
    }

    /// All tensors that the encoder reads, in the order of the forward pass.
    #[must_use]
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let VisionWeights { patches, positions, layers, final_norm, projector } = self.weights();
        let mut list = Vec::new();
        patches.list(&mut list);
        list.push(positions);
        for layer in layers {
            let VisionLayerWeights { attention_norm, qkv, output, mlp_norm, up, down } = layer;
            attention_norm.list(&mut list);
            qkv.into_iter().chain([output]).for_each(|linear| linear.list(&mut list));
            mlp_norm.list(&mut list);
            [up, down].into_iter().for_each(|linear| linear.list(&mut list));
        }
        final_norm.list(&mut list);
        match projector {
            ProjectorWeights::PixelShuffle(matrix) => list.push(matrix),
            ProjectorWeights::AveragePooling { norm, projection } => {
                list.extend([norm, projection]);
            }
            ProjectorWeights::Tiles(mlp) => mlp.into_iter().for_each(|part| part.list(&mut list)),
            ProjectorWeights::Merger { mlp, deepstack } => {
                mlp.into_iter().for_each(|part| part.list(&mut list));
                for MergerWeights { norm, mlp } in deepstack {
                    norm.list(&mut list);
                    mlp.into_iter().for_each(|part| part.list(&mut list));
                }
            }
        }
        if let Some(regions) = self.region_weights() {
            regions.list(&mut list);
        }
        list
    }
}

impl RegionWeights {
    fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { norm, coordinates, sizes } = self;
        norm.into_iter().for_each(|norm| norm.list(list));
        for ValueWeights { frequencies, encoder, inner, bins } in [coordinates, sizes] {
            list.push(frequencies);
            [Some(encoder), inner, Some(bins)]
                .into_iter()
                .flatten()
                .for_each(|linear| linear.list(list));
        }
    }
}

impl LayerNormWeights {
    fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { weight, bias } = self;
        list.extend([weight, bias]);
    }
}

fn linear(module: &str, shape: [usize; 2]) -> LinearWeights {
    super::super::tensors::linear(module, shape, true)
}

fn norm(module: &str, size: usize) -> LayerNormWeights {
    let vector =
        |part: &str, role| TensorSpec { name: format!("{module}.{part}"), shape: vec![size], role };
    LayerNormWeights {
        weight: vector("weight", TensorRole::PlainNorm),
        bias: vector("bias", TensorRole::Bias),
    }
}
