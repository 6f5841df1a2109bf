//! Lists the tensors of each part of a decoder, in the order of the forward pass. Each part is
//! destructured with all fields named, so a tensor that is added is a compile error until it is
//! listed.

use super::{
    AttentionWeights, ConvolutionWeights, DeltaNetWeights, DenseAndExpertsWeights, ExpertsWeights,
    FactoredWeights, FeedForwardWeights, LatentWeights, LayerWeights, LinearWeights, Mamba2Weights,
    MixerWeights, MlpInputs, MlpWeights, NormWeights, PerLayerEmbeddingWeights, PerLayerWeights,
    SelectiveWeights, SharedExpertWeights, StackedWeights, TensorSpec,
};

impl LinearWeights {
    pub(in crate::config) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { weight, bias } = self;
        list.push(weight);
        list.extend(bias);
    }
}

impl<const N: usize> StackedWeights<N> {
    pub(super) fn matrices(self) -> (String, Vec<TensorSpec>) {
        (self.name, self.parts.into_iter().map(|part| part.weight).collect())
    }

    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { name: _, parts } = self;
        parts.into_iter().for_each(|part| part.list(list));
    }
}

impl MlpWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { inputs, down, output_factor: _ } = self;
        match inputs {
            MlpInputs::Gated(gate_up, _) => gate_up.list(list),
            MlpInputs::Plain(up, _) => up.list(list),
        }
        down.list(list);
    }
}

impl NormWeights {
    pub(in crate::config) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { kind: _, eps: _, offset: _, weight, bias } = self;
        list.push(weight);
        list.extend(bias);
    }
}

impl DenseAndExpertsWeights {
    fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { mlp, mlp_output_norm, experts_input_norm, experts, experts_output_norm } = self;
        mlp.list(list);
        mlp_output_norm.list(list);
        experts_input_norm.list(list);
        experts.list(list);
        experts_output_norm.list(list);
    }
}

impl PerLayerWeights {
    fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { config: _, gate, projection, norm } = self;
        [gate, projection].into_iter().for_each(|linear| linear.list(list));
        norm.list(list);
    }
}

impl PerLayerEmbeddingWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { embedding, projection, norm } = self;
        list.push(embedding);
        projection.list(list);
        list.push(norm);
    }
}

impl ExpertsWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { config: _, router_norm, router, bias, factors, experts, shared } = self;
        router_norm.into_iter().for_each(|norm| norm.list(list));
        router.list(list);
        list.extend(bias.into_iter().chain(factors));
        experts.into_iter().for_each(|expert| expert.list(list));
        if let Some(SharedExpertWeights { mlp, gate }) = shared {
            mlp.list(list);
            if let Some(gate) = gate {
                gate.list(list);
            }
        }
    }
}

impl AttentionWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { config: _, qkv, q_norm, k_norm, sinks, selective, gate, output } = self;
        qkv.parts().for_each(|part| part.list(list));
        list.extend(q_norm.into_iter().chain(k_norm).chain(sinks));
        if let Some(SelectiveWeights { queries, values, alpha }) = selective {
            list.extend([queries, values, alpha]);
        }
        if let Some(gate) = gate {
            gate.list(list);
        }
        output.list(list);
    }
}

impl ConvolutionWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { inputs, taps, output } = self;
        inputs.list(list);
        list.push(taps);
        output.list(list);
    }
}

impl DeltaNetWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { config: _, qkv, gate, strength, step, step_bias, rates, taps, norm, output } =
            self;
        qkv.into_iter().for_each(|part| part.list(list));
        gate.list(list);
        strength.list(list);
        step.list(list);
        list.extend([step_bias, rates].into_iter().chain(taps).chain([norm]));
        output.list(list);
    }
}

impl FactoredWeights {
    fn list(self, list: &mut Vec<TensorSpec>) {
        let Self { down, up } = self;
        down.into_iter().chain([up]).for_each(|factor| factor.list(list));
    }
}

impl Mamba2Weights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self {
            config: _,
            inputs,
            step_bias,
            rates,
            skip,
            taps,
            convolution_bias,
            norm,
            output,
        } = self;
        inputs.list(list);
        list.extend([step_bias, rates, skip, taps]);
        list.extend(convolution_bias.into_iter().chain(norm));
        output.list(list);
    }
}

impl LatentWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self {
            config: _,
            query_down,
            query,
            latent,
            latent_norm,
            keys,
            values,
            name: _,
            output,
        } = self;
        if let Some((down, norm)) = query_down {
            down.list(list);
            list.push(norm);
        }
        [query, latent].into_iter().for_each(|linear| linear.list(list));
        list.push(latent_norm);
        list.extend(keys.into_iter().chain(values));
        output.list(list);
    }
}

impl LayerWeights {
    pub(super) fn list(self, list: &mut Vec<TensorSpec>) {
        let Self {
            attention_input_norm,
            mixers,
            attention_output_norm,
            mlp_input_norm,
            mlp,
            mlp_output_norm,
            per_layer,
            scale,
        } = self;
        attention_input_norm.into_iter().for_each(|norm| norm.list(list));
        mixers.into_iter().for_each(|mixer| match mixer {
            MixerWeights::Attention(attention) => attention.list(list),
            MixerWeights::Convolution(convolution) => convolution.list(list),
            MixerWeights::DeltaNet(delta_net) => delta_net.list(list),
            MixerWeights::Mamba2(mamba2) => mamba2.list(list),
            MixerWeights::Latent(latent) => latent.list(list),
        });
        attention_output_norm.into_iter().for_each(|norm| norm.list(list));
        mlp_input_norm.into_iter().for_each(|norm| norm.list(list));
        match mlp {
            Some(FeedForwardWeights::Dense(mlp)) => mlp.list(list),
            Some(FeedForwardWeights::Experts(experts)) => experts.list(list),
            Some(FeedForwardWeights::DenseAndExperts(both)) => both.list(list),
            None => {}
        }
        mlp_output_norm.into_iter().for_each(|norm| norm.list(list));
        if let Some(per_layer) = per_layer {
            per_layer.list(list);
        }
        list.extend(scale);
    }
}
