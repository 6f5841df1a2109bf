//! What is known of the rotary embeddings of an architecture.

use crate::config::RopeScaling;

/// The rotary embeddings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation {
    /// Default of `rope_theta`.
    pub(in crate::config) theta: f64,
    /// The same for layers with a window, if these have another rotary embedding.
    pub(in crate::config) local_theta: Option<f64>,
    /// The share of each head that is rotated if the key `partial_rotary_factor` is missing; `None`
    /// if heads are always rotated as a whole.
    pub(in crate::config) partial: Option<f64>,
    /// The default of `partial_rotary_factor` if layers without a window have the `rope_type`
    /// `proportional`; `None` if the architecture does not have it.
    pub(in crate::config) proportional: Option<f64>,
    /// Whether adjacent elements of a head form the pairs that are rotated. Otherwise these are the
    /// elements `i` and `i + rotary_dim / 2`, and so it is in memory: the rows of q and k are
    /// reordered.
    pub(crate) adjacent: bool,
    /// Every such layer has no rotary embedding, unless `no_rope_layers` says otherwise (SmolLM3);
    /// `None` if all have one.
    pub(in crate::config) unrotated_step: Option<usize>,
    /// Whether no layer has a rotary embedding (Nemotron-H).
    pub(in crate::config) nowhere: bool,
    /// Whether, if some layers have a window, only these have a rotary embedding (EXAONE 4).
    pub(in crate::config) local_only: bool,
    /// Default of `original_max_position_embeddings`.
    pub(in crate::config) original_context: Option<usize>,
    /// The sections of rotary positions with three coordinates if the key `mrope_section` is
    /// missing ([`default_sections`](Self::default_sections)); `None` if positions have one.
    pub(in crate::config) sections: Option<[usize; 3]>,
    /// The scaling if the key `rope_parameters` is missing.
    pub(in crate::config) scaling: Option<&'static RopeScaling>,
}

impl Rotation {
    /// The sections if the key `mrope_section` is missing and `rotary_dim` elements of a head are
    /// rotated. A text model of another shape than the published ones has none.
    pub(in crate::config) fn default_sections(&self, rotary_dim: usize) -> Option<[usize; 3]> {
        self.sections.filter(|sections| sections.iter().sum::<usize>() == rotary_dim / 2)
    }

    /// The context of the original training, if the default scaling names it.
    pub(crate) fn original(&self) -> Option<usize> {
        match self.scaling {
            Some(RopeScaling::Yarn { original_max_position_embeddings, .. }) => {
                Some(*original_max_position_embeddings)
            }
            _ => None,
        }
    }
}
