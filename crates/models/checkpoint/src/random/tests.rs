use super::*;

/// Goal: the table has the quantiles, mean and variance of the standard normal distribution.
#[test]
fn quantiles_are_normally_distributed() {
    let table = normal::quantiles();
    assert_eq!(table.len(), 65_536);
    assert!(table.is_sorted());
    let at = |share: f64| table[(share * 65_536.0) as usize];
    assert!((at(0.975) - 1.959_96).abs() < 1e-3, "{}", at(0.975));
    assert!((at(0.841_344_7) - 1.0).abs() < 1e-3);
    let mean: f64 = table.iter().map(|x| f64::from(*x)).sum::<f64>() / 65_536.0;
    let square: f64 = table.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 65_536.0;
    assert!(mean.abs() < 1e-6, "{mean}");
    assert!((square - 1.0).abs() < 1e-3, "{square}");
}

/// Goal: the same seed and tensor lead to the same bytes, and another seed or tensor leads to other
/// bytes.
#[test]
fn weights_depend_on_seed_and_tensor() {
    let config = preset("tiny").unwrap();
    let bytes = |seed, name: &str| {
        let weights = random_model(&config, seed).unwrap();
        let shape = weights.shape(name).unwrap().to_vec();
        weights.tensor(name, &shape).unwrap().bytes.into_owned()
    };
    let q = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(bytes(7, q), bytes(7, q));
    assert_ne!(bytes(7, q), bytes(8, q));
    assert_ne!(bytes(7, q), bytes(7, "model.layers.1.self_attn.q_proj.weight"));
}

/// Goal: every preset is a valid configuration of about the size in its name, and the error for an
/// unknown name lists all presets.
#[test]
fn presets_are_valid() {
    let millions = |name: &str| preset(name).unwrap().parameter_count() / 1_000_000;
    for name in PRESETS {
        assert!(preset(name).is_ok(), "{name}");
    }
    assert_eq!(millions("100m"), 100);
    assert_eq!(millions("qwen3-0.6b"), 596);
    assert_eq!(millions("mla-519m"), 519);
    assert_eq!(millions("kda-546m"), 546);
    assert_eq!(millions("moe-1b"), 1284);
    assert_eq!(millions("gemma3-1b"), 999);
    assert_eq!(millions("llama3.2-1b"), 1235);
    assert_eq!(millions("moondream2"), 1418);
    assert_eq!(millions("qwen3-vl-2b"), 1720);
    assert_eq!(millions("gemma2-2b"), 2614);
    assert_eq!(millions("smollm3-3b"), 3075);
    assert_eq!(millions("phi4-mini"), 3836);
    let error = preset("200m").unwrap_err().to_string();
    assert!(error.contains("`200m`") && error.contains("qwen3-0.6b"), "{error}");
}

/// Goal: a random model has exactly the tensors that its configuration requires, in the configured
/// type, and a quantized type is refused.
#[test]
fn random_weights_match_the_configuration() {
    let mut config = preset("tiny").unwrap();
    for dtype in [TensorType::F32, TensorType::F16, TensorType::Bf16] {
        config.dtype = dtype;
        let weights = random_model(&config, 1).unwrap();
        weights.check(&config).unwrap();
        assert_eq!(weights.names().count(), config.tensors().len());
        let bytes = config.parameter_count() * dtype.block_bytes() as u64;
        assert_eq!(weights.total_bytes(), bytes);
    }
    config.dtype = TensorType::Q8_0;
    assert!(matches!(random_model(&config, 1), Err(ModelError::Unsupported { .. })));
}

/// Goal: a random vision model has an encoder, and a tokenizer in which each token that marks an
/// image is one token, with the id that the processor names.
#[test]
fn vision_models_have_tokens_for_images() {
    for name in ["smolvlm-tiny", "qwen3-vl-tiny", "qwen3.5-vl-tiny"] {
        let model = load(name, 1).unwrap();
        let images = model.images.expect("a vision model");
        model.weights.check_encoder(&images.encoder).unwrap();
        let tokenizer = stolon_text::Tokenizer::new(&model.text.tokenizer).unwrap();
        assert!(tokenizer.vocab_size() <= model.config.vocab_size);
        let encode = |text: &str| tokenizer.encode(text, false).unwrap();
        assert_eq!(encode(&images.processor.image_token), [images.processor.image_token_id]);
        for token in vision::Prompts::of(&images.processor.tiling).tokens {
            assert_eq!(encode(&token).len(), 1, "{token}");
        }
        assert!(model.text.chat_template.unwrap().contains(&images.processor.placeholder));
    }
    let moondream = load("moondream2-tiny", 1).unwrap();
    let images = moondream.images.expect("a vision model");
    moondream.weights.check_encoder(&images.encoder).unwrap();
    assert_eq!(images.encoder.first_token, moondream.skills.map(|skills| skills.first_token));
    let tokenizer = stolon_text::Tokenizer::new(&moondream.text.tokenizer).unwrap();
    let text: String = ('\0'..='\u{17f}').collect();
    assert_eq!(
        tokenizer.encode(&text, false).unwrap(),
        text.bytes().map(u32::from).collect::<Vec<_>>()
    );
}
