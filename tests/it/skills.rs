//! Questions about images and descriptions of them with a model that was trained for these tasks,
//! on small random models of the structure of Moondream 2 and 3.

use std::sync::Arc;

use bits::bits;
use pictures::picture;
use stolon::{
    BoundingBox, CaptionLength, ChatMessage, Engine, EngineBuilder, Error, Event, FinishReason,
    Grammar, LogitsProcessor, Point, PromptPart, Reasoning, Request, SamplingError, SamplingParams,
    SessionOptions, SpatialRef,
};
use stolon_backend::RegionToken;

use crate::support::{bits, pictures};

/// Number of positions of an image, with the token before it.
const ROWS: usize = 26;

const MODELS: [&str; 2] = ["random:moondream2-tiny", "random:moondream3-tiny"];

fn builder() -> EngineBuilder {
    builder_of(MODELS[0])
}

fn builder_of(model: &str) -> EngineBuilder {
    Engine::builder().model(model).num_blocks(8192).threads(1)
}

/// A point and a box.
fn places() -> [SpatialRef; 2] {
    let (x_min, y_min, x_max, y_max) = (0.25, 0.0, 0.75, 0.125);
    let around = SpatialRef::Box(BoundingBox { x_min, y_min, x_max, y_max });
    [SpatialRef::Point(Point { x: 0.0, y: 1.0 }), around]
}

/// With log-probabilities, so that answers are compared bit by bit.
fn short(request: Request) -> Request {
    request.max_tokens(6).logprobs(0)
}

/// Goal: an answer about an image has the same bits with a warm and with a cold cache, at every
/// block size and size of steps, although an image of several tiles is larger than a step. Images
/// share nothing, not even the token that begins the prompt, because it attends to the image.
#[tokio::test]
async fn warm_answers_equal_cold_ones() -> Result<(), Error> {
    for model in MODELS {
        warm_equals_cold(model).await?;
    }
    Ok(())
}

async fn warm_equals_cold(model: &str) -> Result<(), Error> {
    let (one, other) = (picture(40, 30, 1), picture(190, 120, 2));
    let prompts = [
        short(Request::query("What is this?").image(Arc::clone(&one))),
        short(Request::query("What is this thing?").image(Arc::clone(&one))),
        short(Request::caption(CaptionLength::Short).image(Arc::clone(&one))),
        short(Request::query("What is this?").image(Arc::clone(&other))),
        short(Request::query("What is this?")),
        short(Request::query_about("What is this?", places()).image(Arc::clone(&one))),
    ];
    let mut cold = Vec::new();
    for prompt in &prompts {
        let engine = builder_of(model).prefix_caching(false).build().await?;
        cold.push(bits(&engine.complete(prompt.clone()).await?));
        engine.shutdown().await;
    }
    for pair in cold.windows(2) {
        assert_ne!(pair[0], pair[1], "the prompts lead to different logits");
    }
    for (block_size, step) in [(1, 512), (1, 5), (4, 33), (16, 7)] {
        let builder = builder_of(model).block_size(block_size).max_batched_tokens(step);
        let engine = builder.num_blocks(8192 / block_size).build().await?;
        for round in 0..2 {
            for (index, (prompt, cold)) in prompts.iter().zip(&cold).enumerate() {
                let answer = engine.complete(prompt.clone()).await?;
                assert_eq!(bits(&answer), *cold, "{model}, blocks of {block_size}, round {round}");
                let usage = answer.finish.usage;
                assert_eq!(usage.image_tokens, if index == 4 { 0 } else { ROWS });
                if block_size > 1 {
                    // The end of an image is mostly within a block.
                    continue;
                }
                if round == 0 {
                    let is_new = [0, 3, 4].contains(&index);
                    assert_eq!(usage.cached_tokens == 0, is_new, "{index}");
                } else {
                    assert!(usage.cached_tokens + 1 >= usage.prompt_tokens, "{usage:?}");
                }
            }
        }
        if block_size == 1 {
            assert_eq!(engine.stats().images_encoded, 2);
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}

/// Goal: prompts have the tokens of the model's configuration around the words, and the image
/// before them. Prompts of text and of token ids have the image there, too, without a second token
/// that begins a sequence.
#[tokio::test]
async fn prompts_are_those_of_the_configuration() -> Result<(), Error> {
    let engine = builder().build().await?;
    assert_eq!(engine.model_info().skills, ["query", "caption", "point", "detect"]);
    let image = picture(9, 9, 1);
    let tokens = async |request: Request| engine.prompt_tokens(&request).await;
    let question = tokens(Request::query(" ab ")).await?;
    assert_eq!(question, [0, 1, 81, 2, 97, 98, 3, 3]);
    let question = tokens(Request::query("ab").image(Arc::clone(&image))).await?;
    assert_eq!((question.len(), &question[ROWS..]), (ROWS + 7, &[1, 81, 2, 97, 98, 3, 3][..]));
    assert!(question[..ROWS].iter().all(|id| *id >= 320));
    for (length, word) in
        [(CaptionLength::Short, 115), (CaptionLength::Normal, 110), (CaptionLength::Long, 108)]
    {
        let caption = tokens(Request::caption(length).image(Arc::clone(&image))).await?;
        assert_eq!((caption.len(), &caption[ROWS..]), (ROWS + 5, &[1, 67, 2, word, 3][..]));
    }
    let parts = [PromptPart::Image, PromptPart::Text("ab".to_owned())];
    for request in [
        Request::text("ab"),
        Request::tokens([97, 98]),
        Request::tokens([0, 97, 98]),
        Request::parts(parts),
    ] {
        let tokens = tokens(request.image(Arc::clone(&image))).await?;
        assert_eq!((tokens.len(), &tokens[ROWS..]), (ROWS + 2, &[97, 98][..]));
    }
    Ok(())
}

/// Goal: places in an image are tokens before the words of a task: two coordinates for a point, the
/// center and the size of a box. As parts of a prompt and as token ids they are the same, and a
/// session can continue after an answer that has them.
#[tokio::test]
async fn places_are_tokens_of_the_prompt() -> Result<(), Error> {
    let engine = builder().build().await?;
    let bins = engine.model_info().regions.expect("bins");
    let image = picture(9, 9, 1);
    let coordinate = |at| RegionToken::Coordinate { bin: bins.coordinate_bin(at) };
    let size = |width, height| RegionToken::Size {
        width_bin: bins.size_bin(width),
        height_bin: bins.size_bin(height),
    };
    let (last, middle) = (bins.coordinates as u32 - 1, coordinate(0.5));
    assert_eq!(
        (coordinate(0.0), coordinate(1.0)),
        (RegionToken::Coordinate { bin: 0 }, RegionToken::Coordinate { bin: last },)
    );
    let spans = [coordinate(0.0), coordinate(1.0), middle, coordinate(0.0625), size(0.5, 0.125)];
    let spans = spans.map(|span| span.token().expect("a token"));
    let request = Request::query_about("ab", places()).image(Arc::clone(&image));
    let question = engine.prompt_tokens(&request).await?;
    let expected = [&[1, 81, 2][..], &spans, &[97, 98, 3, 3]].concat();
    assert_eq!(&question[ROWS..], expected);
    let request = Request::point_about("a", places()).image(Arc::clone(&image));
    let point = engine.prompt_tokens(&request).await?;
    let words = point.len() - ROWS - spans.len();
    let without = engine.prompt_tokens(&Request::point("a").image(Arc::clone(&image))).await?;
    let at = point.iter().position(|token| *token == spans[0]).expect("a coordinate");
    assert_eq!((words, &point[at..at + 5]), (without.len() - ROWS, &spans[..]));

    let parts = vec![
        PromptPart::Image,
        PromptPart::Tokens(vec![1, 81, 2]),
        PromptPart::Coordinate(0.0),
        PromptPart::Coordinate(1.0),
        PromptPart::Coordinate(0.5),
        PromptPart::Coordinate(0.0625),
        PromptPart::Size { width: 0.5, height: 0.125 },
        PromptPart::from("ab"),
        PromptPart::Tokens(vec![3, 3]),
    ];
    let of_parts = short(Request::parts(parts).image(Arc::clone(&image)));
    let of_tokens = short(Request::tokens(expected).image(Arc::clone(&image)));
    assert_eq!(engine.prompt_tokens(&of_parts).await?, question);
    let answer = engine.complete(of_parts.clone()).await?;
    assert_eq!(bits(&engine.complete(of_tokens).await?), bits(&answer));
    let found = engine.cache().query_match_len(&of_parts)?;
    let block_size = engine.model_info().block_size;
    assert_eq!(found, question.len() / block_size * block_size);

    engine.sessions().open(SessionOptions::new("places"))?;
    let point = Request::point("cat").image(Arc::clone(&image)).max_tokens(5);
    let found = engine.complete(point.session("places")).await?;
    assert!(!found.points(engine.model_info()).is_empty());
    let turn = Request::parts([PromptPart::Coordinate(0.5), PromptPart::from("ab")]);
    let turn = short(turn).session("places").append();
    let usage = engine.complete(turn).await?.finish.usage;
    assert!(usage.cached_tokens > ROWS, "{usage:?}");
    Ok(())
}

/// Goal: points and boxes are found with the same bits warm and cold, whether the request runs
/// alone or with others, and cached logits of the vocabulary are not used for coordinates.
#[tokio::test]
async fn points_and_boxes_are_found() -> Result<(), Error> {
    for model in MODELS {
        finds_points_and_boxes(model).await?;
    }
    Ok(())
}

async fn finds_points_and_boxes(model: &str) -> Result<(), Error> {
    let image = picture(120, 70, 1);
    let requests = [
        Request::point("cat").image(Arc::clone(&image)).max_tokens(9),
        Request::detect("cat").image(Arc::clone(&image)).max_tokens(10),
        Request::query("cat").image(Arc::clone(&image)).max_tokens(5),
    ];
    let mut cold = Vec::new();
    for request in &requests {
        let engine = builder_of(model).prefix_caching(false).build().await?;
        cold.push(engine.complete(request.clone()).await?);
        engine.shutdown().await;
    }
    for block_size in [1, 16] {
        let builder = builder_of(model).block_size(block_size);
        let engine = builder.num_blocks(4096 / block_size).build().await?;
        let info = engine.model_info();
        for _ in 0..2 {
            let all = requests.iter().map(|request| engine.complete(request.clone()));
            let all = futures::future::try_join_all(all).await?;
            for (answer, cold) in all.iter().zip(&cold) {
                assert_eq!(answer.token_ids, cold.token_ids, "{model}, blocks of {block_size}");
            }
            for (answer, found, tokens) in
                [(&all[0], all[0].points(info).len(), 2), (&all[1], all[1].boxes(info).len(), 3)]
            {
                // The other tokens are the end, or an object that was cut off.
                let rest = answer.token_ids.len() - tokens * found;
                assert!(found > 0 && rest < tokens, "{:?}", answer.token_ids);
            }
            assert!(all[0].boxes(info).is_empty());
            assert!(all[0].text.is_empty() && all[1].text.is_empty());
            for found in all[1].boxes(info) {
                assert!(found.x_min <= found.x_max && found.y_min <= found.y_max, "{found:?}");
            }
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}

/// Sampling parameters with this bias, which makes the tokens more likely.
fn biased(temperature: f32, bias: &[(u32, f32)]) -> SamplingParams {
    let logit_bias = bias.into();
    SamplingParams { temperature, logit_bias, seed: Some(1), ..SamplingParams::default() }
}

/// Goal: a model that reasons does so before the answer, with coordinates and without the tokens
/// that occur in neither. The text of the stream is the text of the answer. Reasoning and answer
/// have the same bits warm and cold, at every block size and size of steps, and alone and with
/// others.
#[tokio::test]
async fn reasoning_comes_before_the_answer() -> Result<(), Error> {
    let image = picture(120, 70, 1);
    let bias = [(0, 2.0), (3, 1.0), (6, 2.0), (7, 3.0), (9, 3.0), (227, 4.0)];
    let requests = [
        Request::reason_about("Why?", places()).image(Arc::clone(&image)),
        Request::reason_about("Why?", []).image(Arc::clone(&image)),
        Request::reason_about("Why?", []),
    ];
    let requests = requests.map(|request| request.sampling(biased(1.0, &bias)).max_tokens(200));
    let mut cold = Vec::new();
    for request in &requests {
        let engine = builder_of(MODELS[1]).prefix_caching(false).build().await?;
        assert!(engine.model_info().reasons);
        let answer = engine.complete(request.clone()).await?;
        let tokens = &answer.token_ids;
        assert_eq!(answer.finish.usage.completion_tokens, tokens.len());
        let end = tokens.iter().position(|token| *token == 3).expect("the end of the reasoning");
        let (before, after) = (&tokens[..end], &tokens[end + 1..]);
        assert!(!before.iter().any(|token| [0, 6, 227].contains(token)), "{before:?}");
        assert!(!after.iter().any(|token| *token == 3 || *token >= 320), "{after:?}");
        let without_end = after.strip_suffix(&[0]).unwrap_or(after);
        assert_eq!(answer.text, engine.detokenize(without_end, true)?);
        let reasoning = engine.reasoning(tokens)?;
        let texts = before.split(|token| [7, 9].contains(token));
        let texts = texts.map(|ids| engine.detokenize(ids, true)).collect::<Result<Vec<_>, _>>()?;
        assert_eq!(reasoning.text, texts.concat());
        assert!(!reasoning.grounding.is_empty(), "{before:?}");
        assert_eq!(engine.reasoning(before)?, reasoning);
        cold.push(answer);
        engine.shutdown().await;
    }
    for (block_size, step) in [(1, 512), (4, 33), (16, 7)] {
        let builder = builder_of(MODELS[1]).block_size(block_size).max_batched_tokens(step);
        let engine = builder.num_blocks(8192 / block_size).build().await?;
        for _ in 0..2 {
            let all = requests.iter().map(|request| engine.complete(request.clone()));
            for (answer, cold) in futures::future::try_join_all(all).await?.iter().zip(&cold) {
                assert_eq!(answer.token_ids, cold.token_ids, "blocks of {block_size}");
                assert_eq!(answer.text, cold.text);
            }
        }
        engine.audit().await?;
        engine.shutdown().await;
    }
    Ok(())
}

/// Goal: the answer equals the answer to a prompt that has the tokens of reasoning after the
/// question, then the reasoning and its end. The maximum number of tokens bounds both together, and
/// a request that is canceled while it reasons leaves nothing behind.
#[tokio::test]
async fn reasoning_is_part_of_the_prompt_of_the_answer() -> Result<(), Error> {
    let engine = builder_of(MODELS[1]).build().await?;
    let image = picture(40, 30, 1);
    let ask = |bias: &[(u32, f32)]| {
        let request = Request::reason_about(" ab ", []).image(Arc::clone(&image));
        request.sampling(biased(0.0, bias)).max_tokens(9)
    };
    let prompt = engine.prompt_tokens(&ask(&[])).await?;
    assert_eq!(&prompt[ROWS..], [1, 81, 2, 97, 98, 4]);
    let answer = engine.complete(ask(&[(3, 100.0)])).await?;
    assert_eq!(answer.token_ids[0], 3);
    assert_eq!(engine.reasoning(&answer.token_ids)?, Reasoning::default());
    let whole = Request::tokens([1, 81, 2, 97, 98, 4, 3]).image(Arc::clone(&image)).max_tokens(8);
    let whole = engine.complete(whole.sampling(biased(0.0, &[(3, -100.0)]))).await?;
    assert_eq!((&answer.token_ids[1..], &answer.text), (&whole.token_ids[..], &whole.text));

    let cut = engine.complete(ask(&[(97, 100.0)])).await?;
    assert_eq!((cut.text.as_str(), &cut.finish.reason), ("", &FinishReason::Length));
    assert_eq!(cut.finish.usage.completion_tokens, 9);
    let mut reasoning = Reasoning::default();
    reasoning.text = "a".repeat(9);
    assert_eq!(engine.reasoning(&cut.token_ids)?, reasoning);
    let points = engine.complete(ask(&[(227, 100.0)])).await?;
    let reasoning = engine.reasoning(&points.token_ids)?;
    assert_eq!((reasoning.text.as_str(), reasoning.grounding.len()), ("", 1));
    assert_eq!(reasoning.grounding[0].points, points.points(engine.model_info()));
    assert_eq!(reasoning.grounding[0].points.len(), 4);

    let mut stream = engine.generate(ask(&[(97, 100.0)]).max_tokens(4000)).await?;
    while !matches!(stream.next().await, Some(Ok(Event::Token(_)))) {}
    drop(stream);
    while engine.stats().running > 0 {
        tokio::task::yield_now().await;
    }
    engine.audit().await?;
    Ok(())
}

/// Goal: reasoning is refused where the model or the request does not permit it.
#[tokio::test]
async fn reasoning_is_refused_where_it_is_not_possible() -> Result<(), Error> {
    struct Own;
    impl LogitsProcessor for Own {
        fn process(&self, _output: &[u32], _logits: &mut [f32]) -> Result<(), SamplingError> {
            Ok(())
        }
    }
    let ask = || Request::reason_about("a", []);
    let image = picture(9, 9, 1);
    let engine = builder_of(MODELS[1]).build().await?;
    for (request, expected) in [
        (Request::reason_about(" ", []), "question: expected a question, got an empty text"),
        (Request::reason_about("a", places()), "spatial_refs: expected none without an image"),
        (ask().grammar(Grammar::Regex("a".to_owned())), "grammar: expected none for an answer"),
        (ask().logits_processor(Own), "processor: expected none for an answer"),
        (Request::point("a").image(image).logits_processor(Own), "processor: expected none"),
        (ask().prompt_logprobs(0), "prompt_logprobs"),
    ] {
        let error = engine.complete(request).await.expect_err("a bad request").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let other = builder_of(MODELS[0]).build().await?;
    assert!(!other.model_info().reasons);
    let expected = "reasoning: expected a model that reasons before it answers (Moondream 3)";
    let error = other.complete(ask()).await.expect_err("no reasoning").to_string();
    assert!(error.contains(expected), "{error}");
    let error = other.reasoning(&[]).expect_err("no reasoning").to_string();
    assert!(error.contains(expected), "{error}");
    Ok(())
}

/// Goal: tokens that do not occur in answers are never chosen, and only in answers of skills.
#[tokio::test]
async fn answers_have_no_tokens_of_prompts() -> Result<(), Error> {
    let engine = builder().build().await?;
    let with_bias = |request: Request| short(request).sampling(biased(0.0, &[(3, 100.0)]));
    let answer = engine.complete(with_bias(Request::query("a"))).await?;
    assert!(!answer.token_ids.contains(&3), "{:?}", answer.token_ids);
    let answer = engine.complete(with_bias(Request::text("a"))).await?;
    assert_eq!(answer.token_ids, [3; 6]);
    Ok(())
}

/// Goal: requests that are not possible are refused with an error that says what was expected.
#[tokio::test]
async fn errors_say_what_was_expected() -> Result<(), Error> {
    let engine = builder().build().await?;
    let image = picture(9, 9, 1);
    let around = |x_min, x_max| {
        let (y_min, y_max) = (0.0, 1.0);
        let place = SpatialRef::Box(BoundingBox { x_min, y_min, x_max, y_max });
        Request::query_about("a", [place]).image(Arc::clone(&image))
    };
    let (out_of_range, reversed) = (around(0.5, 1.5), around(0.5, 0.25));
    let part = || PromptPart::Coordinate(0.5);
    let unknown = RegionToken::Coordinate { bin: 1 << 14 }.token().expect("a token");
    let two = Request::query("a").image(Arc::clone(&image)).image(Arc::clone(&image));
    for (request, expected) in [
        (two, "images: expected one image, got 2"),
        (Request::query(" "), "question: expected a question, got an empty text"),
        (Request::caption(CaptionLength::Long), "images: expected an image, got 0"),
        (Request::point("a"), "images: expected an image, got 0"),
        (Request::detect("").image(Arc::clone(&image)), "object: expected the name of a thing"),
        (Request::query("a").image_url("http://a/b.png"), "expected a data URL in base64"),
        (Request::query("a").image_url("data:image/png;base64,a!"), "Invalid symbol"),
        (Request::chat(vec![ChatMessage::user("a")]), "chat template"),
        (
            Request::query_about("a", places()),
            "spatial_refs: expected none without an image, got 2",
        ),
        (out_of_range, "spatial_refs: expected points [x, y] and boxes"),
        (reversed, "spatial_refs: expected points [x, y] and boxes"),
        (Request::parts([PromptPart::Coordinate(f32::NAN)]), "numbers from 0 to 1, got Coord"),
        (Request::parts([PromptPart::Image]), "an image for each part that is one, got 0"),
        (Request::parts([]), "the prompt is empty"),
        (Request::parts([part()]).image(Arc::clone(&image)), "images: expected 0, as many as"),
        (Request::parts([part()]).prompt_logprobs(0), "none for a prompt with coordinates"),
        (Request::tokens([unknown]), "expected an id below"),
    ] {
        let error = engine.complete(request).await.expect_err("a bad request").to_string();
        assert!(error.contains(expected), "{error}");
    }
    let other = Engine::builder().model("random:tiny").num_blocks(64).threads(1).build().await?;
    assert!(other.model_info().skills.is_empty());
    let error = other.complete(Request::parts([part()])).await.expect_err("no bins").to_string();
    assert!(error.contains("the model has no tokens for coordinates"), "{error}");
    let error = other.complete(Request::query("a")).await.expect_err("no skill").to_string();
    assert!(error.contains("expected a model that was trained to answer questions"), "{error}");
    Ok(())
}
