//! Answers and tools with Rust types.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::json;
use stolon::schemars::JsonSchema;
use stolon::{Engine, Error, Request, SamplingParams, Tool};

/// A token without a string, which ends an answer.
const END: u32 = 300;

#[derive(Debug, Deserialize, JsonSchema, PartialEq)]
#[schemars(crate = "stolon::schemars")]
#[serde(rename_all = "snake_case")]
enum Sky {
    Clear,
    Cloudy { percent: u8 },
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(crate = "stolon::schemars")]
#[serde(deny_unknown_fields)]
struct Weather {
    sky: Sky,
    is_day: Option<bool>,
    #[schemars(length(max = 2))]
    winds: Vec<Wind>,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema, PartialEq)]
#[schemars(crate = "stolon::schemars")]
struct Wind {
    #[schemars(range(min = 0, max = 12))]
    force: i32,
}

async fn engine() -> Engine {
    let builder = Engine::builder().model("random:tiny").threads(1).num_blocks(256);
    builder.build().await.expect("the engine starts")
}

fn drawn(seed: u64, max_tokens: usize) -> Request {
    let sampling =
        SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
    Request::text("The weather: ").sampling(sampling).max_tokens(max_tokens).stop_ids([END])
}

/// Goal: a model with random weights gives an answer that has the type, or that was cut off.
#[tokio::test(flavor = "multi_thread")]
async fn answers_have_the_type() {
    let engine = engine().await;
    let mut complete = 0;
    let mut kinds = HashSet::new();
    for seed in 0..20 {
        match engine.ask::<Weather>(drawn(seed, 200)).await {
            Ok(weather) => {
                complete += 1;
                assert!(weather.winds.len() <= 2, "{weather:?}");
                let percent = if let Sky::Cloudy { percent } = weather.sky { percent } else { 0 };
                kinds.insert((percent > 100, weather.is_day));
                assert!(weather.winds.iter().all(|wind| (0..=12).contains(&wind.force)));
            }
            Err(Error::NotOfType { reason, text }) => {
                assert!(reason.contains("cut off after 200 tokens"), "{reason}: {text}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(complete >= 10, "{complete} of 20 answers are complete");
    assert!(kinds.len() > 1, "the answers differ: {kinds:?}");
    let cut = engine.ask::<Weather>(drawn(0, 2)).await.expect_err("cut off");
    assert!(matches!(cut, Error::NotOfType { .. }), "{cut}");
}

/// Goal: a tool has the schema of its arguments, and refuses other arguments.
#[tokio::test]
async fn tools_are_functions() {
    let tool = Tool::new("gust", "A stronger wind.", |wind: Wind| match wind.force {
        force @ 0..=11 => Ok(json!(Wind { force: force + 1 })),
        force => Err(format!("there is no wind above {force}")),
    });
    assert_eq!(tool.spec().name, "gust");
    let definition = tool.spec().definition();
    assert_eq!(definition["function"]["parameters"]["required"], json!(["force"]));
    let call = async |arguments| tool.call(arguments).await;
    assert_eq!(call("{\"force\": 3}").await.as_deref(), Ok("{\"force\":4}"));
    assert_eq!(call("{\"force\": 12}").await, Err("there is no wind above 12".to_owned()));
    let wrong = call("{\"strength\": 3}").await.expect_err("other arguments");
    assert!(wrong.contains("missing field `force`"), "{wrong}");
}
