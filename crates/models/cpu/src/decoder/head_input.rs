//! The input of the layers of a draft head: a token, and the hidden state of the position before it.

use std::borrow::Cow;

use stolon_checkpoint::config::{
    DecoderConfig, DraftHeadKind, Eagle3Config, Eagle3Weights, MtpInput, MtpWeights,
};
use stolon_checkpoint::error::ModelError;
use stolon_kernels::{Operands, Path, Sink};

use super::Decoder;
use super::assistant::Assistant;
use super::linear::{Linear, Loader, project};
use super::passes::{Norm, NormVectors, grow, pack_rows};
use crate::workers::Workers;

/// The weights and buffers of the input.
#[derive(Debug)]
pub(super) struct HeadInput {
    kind: Kind,
    /// For each row of the step, the hidden state of the position before it.
    states: Vec<f32>,
    /// Rows that are packed for the projection.
    joined: Operands,
}

/// What the kinds of heads do with the two.
#[derive(Debug)]
enum Kind {
    /// The residual stream begins with the projection of the two, in the order of the input.
    Mtp {
        input: MtpInput,
        embedding_norm: NormVectors,
        hidden_norm: NormVectors,
        projection: Linear,
    },
    /// The projections of the layer read `[norm(embedding), norm(state)]`, and the residual stream
    /// begins with the state.
    Eagle3(Eagle3),
    /// The residual stream begins with the projection of the two, and attention reads the model's keys
    /// and values.
    Gemma4(Assistant),
}

/// The parts of an EAGLE-3 head.
#[derive(Debug)]
struct Eagle3 {
    config: Eagle3Config,
    /// The norm of the features, `[hidden_size]`.
    hidden_norm: NormVectors,
    /// The norms of the model's hidden states: none, one of all states, or one of each.
    state_norms: Vec<NormVectors>,
    /// The projection of the model's hidden states of a position to the one that the head reads.
    projection: Linear,
    /// The input of the layer, `[norm(embedding), norm(state)]`, `[rows, 2 * hidden_size]`.
    pairs: Vec<f32>,
}

impl HeadInput {
    pub(super) fn load(
        (kind, cluster_tokens): (&DraftHeadKind, Option<Vec<u32>>),
        config: &DecoderConfig,
        loader: &mut Loader<'_>,
    ) -> Result<Self, ModelError> {
        let kind = match kind {
            DraftHeadKind::Mtp => {
                let MtpWeights { input, embedding_norm, hidden_norm, projection } =
                    config.mtp_weights();
                let embedding_norm = NormVectors::load(&embedding_norm, loader)?;
                let hidden_norm = NormVectors::load(&hidden_norm, loader)?;
                let projection = loader.linear(&projection)?;
                Kind::Mtp { input, embedding_norm, hidden_norm, projection }
            }
            DraftHeadKind::Eagle3(eagle3) => {
                let Eagle3Weights { hidden_norm, state_norms, projection } =
                    eagle3.input_weights(config);
                let hidden_norm = NormVectors::load(&hidden_norm, loader)?;
                let state_norms = state_norms.iter().map(|norm| NormVectors::load(norm, loader));
                Kind::Eagle3(Eagle3 {
                    config: eagle3.clone(),
                    hidden_norm,
                    state_norms: state_norms.collect::<Result<_, _>>()?,
                    projection: loader.linear(&projection)?,
                    pairs: Vec::new(),
                })
            }
            DraftHeadKind::Gemma4(assistant) => {
                Kind::Gemma4(Assistant::load((assistant, config), cluster_tokens, loader)?)
            }
        };
        Ok(Self { kind, states: Vec::new(), joined: Operands::default() })
    }

    /// Size in bytes of the packed matrix.
    pub(super) fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Mtp { projection, .. } | Kind::Eagle3(Eagle3 { projection, .. }) => {
                projection.bytes()
            }
            Kind::Gemma4(assistant) => assistant.bytes(),
        }
    }

    /// The input of the projections of the layer, `[rows, 2 * hidden_size]`; `None` if it is the
    /// normalized residual stream.
    pub(super) fn pairs(&self) -> Option<&[f32]> {
        match &self.kind {
            Kind::Mtp { .. } | Kind::Gemma4(_) => None,
            Kind::Eagle3(Eagle3 { pairs, .. }) => Some(pairs),
        }
    }

    /// The parts of an assistant of Gemma 4; `None` for other heads.
    pub(super) fn assistant(&self) -> Option<&Assistant> {
        match &self.kind {
            Kind::Gemma4(assistant) => Some(assistant),
            Kind::Mtp { .. } | Kind::Eagle3(_) => None,
        }
    }

    /// The first position that attention reads. A head that stores keys and values has none at
    /// position 0, because no token is before it.
    pub(super) fn first_position(&self) -> usize {
        usize::from(self.assistant().is_none())
    }
}

impl Eagle3 {
    /// The head's hidden states of positions with these hidden states of the model, `[rows, states,
    /// hidden_size]`.
    fn features(
        &self,
        states: &[f32],
        joined: &mut Operands,
        (model, path): (&DecoderConfig, Path),
        workers: &Workers,
    ) -> Vec<f32> {
        let width = self.config.layers.len() * model.hidden_size;
        let rows = states.len() / width;
        joined.reset(rows, &[&self.projection.matrix]);
        pack_rows(joined, workers.for_pass(rows, width), width, |row, out| {
            let states = &states[row * width..][..width];
            if self.state_norms.is_empty() {
                return out.copy_from_slice(states);
            }
            let part = width / self.state_norms.len();
            let parts = states.chunks_exact(part).zip(out.chunks_exact_mut(part));
            for (norm, (states, out)) in self.state_norms.iter().zip(parts) {
                Norm::of(model.hidden_size, Some(norm), path).apply(states, out);
            }
        });
        let mut features = vec![0.0; rows * model.hidden_size];
        project(&self.projection, joined, Sink::Rows(&mut features), path, workers);
        features
    }
}

impl Decoder {
    /// Sets the hidden states that the next step of this head reads: for each of its rows, that of
    /// the position before it.
    ///
    /// # Panics
    /// If this decoder is no draft head.
    pub(crate) fn set_states(&mut self, states: Vec<f32>) {
        self.head_input.as_mut().expect("a draft head").states = states;
    }

    /// The hidden states that this head reads of positions, `[rows, hidden_size]`. `states` are the
    /// model's ([`Decoder::row_states`]).
    pub(crate) fn states_of<'a>(&mut self, states: &'a [f32], workers: &Workers) -> Cow<'a, [f32]> {
        match &mut self.head_input {
            Some(HeadInput { kind: Kind::Eagle3(eagle3), joined, .. }) => {
                eagle3.features(states, joined, (&self.config, self.path), workers).into()
            }
            _ => states.into(),
        }
    }

    /// The parts of an assistant of Gemma 4, if this decoder is one.
    pub(super) fn assistant_mut(&mut self) -> Option<&mut Assistant> {
        match &mut self.head_input {
            Some(HeadInput { kind: Kind::Gemma4(assistant), .. }) => Some(assistant),
            _ => None,
        }
    }

    /// The hidden states of the rows that have got logits in the last step of this head, which it
    /// reads for the guesses that follow.
    pub(crate) fn output_states(&self, rows: usize, workers: &Workers) -> Vec<f32> {
        let x = &self.activations.x[..rows * self.config.hidden_size];
        if let Some(HeadInput { kind: Kind::Eagle3(eagle3), .. }) = &self.head_input
            && !eagle3.config.norm_output
        {
            return x.to_vec();
        }
        let states = self.output_rows(rows, workers);
        match self.head_input.as_ref().and_then(HeadInput::assistant) {
            Some(assistant) => assistant.states(&states, self.path, workers),
            None => states,
        }
    }

    /// The first `rows` rows of the residual stream after the last norm.
    pub(super) fn output_rows(&self, rows: usize, workers: &Workers) -> Vec<f32> {
        let x = &self.activations.x[..rows * self.config.hidden_size];
        let mut states = vec![0.0; x.len()];
        let norm = Norm::of(self.config.hidden_size, Some(&self.final_norm), self.path);
        norm.rows(x, &mut states, workers);
        states
    }

    /// Replaces the embeddings of `rows` rows in the residual stream by the input of the head. Does
    /// nothing in other decoders.
    pub(super) fn join_states(&mut self, rows: usize, workers: &Workers) {
        let Some(input) = &mut self.head_input else { return };
        let (path, width) = (self.path, self.config.hidden_size);
        let x = &mut self.activations.x[..rows * width];
        let norm = |vectors| Norm::of(self.config.hidden_size, vectors, path);
        let HeadInput { kind, states, joined } = input;
        match kind {
            Kind::Mtp { input, embedding_norm, hidden_norm, projection } => {
                let [of_embedding, of_state] =
                    [embedding_norm, hidden_norm].map(|own| norm(Some(&*own)));
                joined.reset(rows, &[&projection.matrix]);
                pack_rows(joined, workers.for_pass(rows, 2 * width), 2 * width, |row, out| {
                    let (mut embedding, mut state) = out.split_at_mut(width);
                    if *input == MtpInput::StateFirst {
                        (embedding, state) = (state, embedding);
                    }
                    of_embedding.apply(&x[row * width..][..width], embedding);
                    of_state.apply(&states[row * width..][..width], state);
                });
                project(projection, joined, Sink::Rows(x), path, workers);
            }
            Kind::Eagle3(Eagle3 { config, hidden_norm, pairs, .. }) => {
                let of_state = norm(Some(hidden_norm));
                let of_embedding = norm(self.layers[0].attention_input_norm.as_ref());
                let is_normed = config.norm_before_residual;
                grow(pairs, rows * 2 * width);
                let chunk = workers.chunk_rows(rows, 2 * width);
                let parts = x.chunks_mut(chunk * width).zip(states.chunks(chunk * width));
                let pairs = pairs[..rows * 2 * width].chunks_mut(chunk * 2 * width);
                workers.run(parts.zip(pairs), |((x, states), pairs)| {
                    let rows = x.chunks_exact_mut(width).zip(states.chunks_exact(width));
                    for ((x, state), pair) in rows.zip(pairs.chunks_exact_mut(2 * width)) {
                        let (embedding, normed) = pair.split_at_mut(width);
                        of_embedding.apply(x, embedding);
                        of_state.apply(state, normed);
                        x.copy_from_slice(if is_normed { normed } else { state });
                    }
                });
            }
            Kind::Gemma4(assistant) => {
                let model = (&*self.tokens, &self.config);
                assistant.join((states, joined, x), model, path, workers);
            }
        }
    }
}
