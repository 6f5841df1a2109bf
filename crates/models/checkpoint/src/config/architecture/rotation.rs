//! The properties of an architecture's rotary embeddings.

use crate::config::RopeScaling;

/// The rotary embeddings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation {
    /// Default of `rope_theta`.
    pub(in crate::config) theta: f64,
    /// Default of the `rope_theta` of layers with a window, if they have another rotary embedding.
    pub(in crate::config) local_theta: Option<f64>,
    /// Default of `partial_rotary_factor`, the share of each head that is rotated; `None` if all
    /// elements of heads are rotated and there is no such key.
    pub(in crate::config) partial: Option<f64>,
    /// Default of `partial_rotary_factor` for the `rope_type` `proportional` of layers without a
    /// window; `None` if the architecture does not have this type.
    pub(in crate::config) proportional: Option<f64>,
    /// Whether adjacent elements of a head form the pairs that are rotated. Otherwise the elements
    /// `i` and `i + rotary_dim / 2` form a pair. In memory, they always do: the rows of q and k are
    /// reordered if necessary.
    pub(crate) adjacent: bool,
    /// Every n-th layer has no rotary embedding, where n is this number, unless `no_rope_layers`
    /// says otherwise (SmolLM3); `None` if all layers have one.
    pub(in crate::config) unrotated_step: Option<usize>,
    /// Whether no layer has a rotary embedding (Nemotron-H).
    pub(in crate::config) nowhere: bool,
    /// Whether only the layers with a window have a rotary embedding, if there are any (EXAONE 4).
    pub(in crate::config) local_only: bool,
    /// Default of `original_max_position_embeddings`.
    pub(in crate::config) original_context: Option<usize>,
    /// The sections of rotary positions with three coordinates if the key `mrope_section` is
    /// missing ([`default_sections`](Self::default_sections)); `None` if positions have one
    /// coordinate.
    pub(in crate::config) sections: Option<[usize; 3]>,
    /// The scaling if the key `rope_parameters` is missing.
    pub(in crate::config) scaling: Option<&'static RopeScaling>,
}

impl Rotation {
    /// The sections if the key `mrope_section` is missing and `rotary_dim` elements of a head are
    /// rotated. They are used only if they fit `rotary_dim`.
    pub(in crate::config) fn default_sections(&self, rotary_dim: usize) -> Option<[usize; 3]> {
        self.sections.filter(|sections| sections.iter().sum::<usize>() == rotary_dim / 2)
    }

    /// The context length of the original training, if the default scaling has it.
    pub(crate) fn original(&self) -> Option<usize> {
        match self.scaling {
            Some(RopeScaling::Yarn { original_max_position_embeddings, .. }) => {
                Some(*original_max_position_embeddings)
            }
            _ => None,
        }
    }
}
