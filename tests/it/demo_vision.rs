//! Answers of the demo model that sees, about pictures that this file draws: with a cold and a warm
//! cache, in several sizes, and from PNG and JPEG files. An image whose embeddings or KV were mixed
//! up with those of another image would show here as a wrong answer.

use std::io::Cursor;
use std::sync::Arc;

use bits::bits;
use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use stolon::{ChatMessage, Completion, Engine, EngineBuilder, Error, Request};

use crate::support::bits;

const RED: [u8; 3] = [215, 30, 30];
const GREEN: [u8; 3] = [30, 150, 60];
const BLUE: [u8; 3] = [30, 90, 220];
const YELLOW: [u8; 3] = [250, 210, 20];
const PURPLE: [u8; 3] = [130, 50, 170];
const BLACK: [u8; 3] = [20, 20, 20];
const WHITE: [u8; 3] = [255, 255, 255];

/// Coordinates of the centers of the places, as a share of the edge of the picture.
const PLACES: [f32; 3] = [1.0 / 6.0, 0.5, 5.0 / 6.0];
/// Half of the size of a shape and of the height of a digit, as a share of the edge of the picture.
const RADIUS: f32 = 0.12;
const DIGIT_HEIGHT: f32 = 0.13;
const DIGIT_WIDTH: f32 = 0.07;
const STROKE: f32 = 0.02;

/// A shape that is drawn at a place.
#[derive(Clone, Copy)]
enum Shape {
    Circle,
    Square,
    Triangle,
    Star,
    /// The strokes of a digit, from its upper left corner to its lower right one: `[x, y, x, y]`,
    /// where 1 is the width and half of the height.
    Digit(&'static [[f32; 4]]),
}

const FOUR: Shape =
    Shape::Digit(&[[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 2.0]]);
const SEVEN: Shape = Shape::Digit(&[[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.35, 2.0]]);

/// A shape with its color and its place: the column and the row, from 0 to 2.
type Thing = (Shape, [u8; 3], [usize; 2]);

/// A picture with its questions and their answers.
struct Case {
    things: &'static [Thing],
    background: [u8; 3],
    questions: &'static [(&'static str, &'static str)],
}

const CASES: &[Case] = &[
    Case {
        things: &[
            (Shape::Circle, RED, [0, 0]),
            (Shape::Square, BLUE, [1, 1]),
            (Shape::Square, GREEN, [2, 2]),
            (SEVEN, BLACK, [2, 0]),
        ],
        background: WHITE,
        questions: &[
            ("What colour is the circle?", "The circle is red."),
            ("What is in the middle?", "A blue square is in the middle."),
            ("Which digit is shown?", "The digit is 7."),
            ("Where is the circle?", "The circle is at the top left."),
            ("Is there a green square?", "Yes."),
            ("Is there a red square?", "No."),
            ("How many squares are there?", "There are 2 squares."),
            ("How many red shapes are there?", "There is 1 red shape."),
            ("Where is the star?", "There is no star."),
        ],
    },
    Case {
        things: &[
            (Shape::Star, YELLOW, [0, 2]),
            (Shape::Triangle, PURPLE, [2, 1]),
            (FOUR, WHITE, [1, 0]),
        ],
        background: [24, 26, 34],
        questions: &[
            ("What colour is the star?", "The star is yellow."),
            ("Which digit is shown?", "The digit is 4."),
            ("What is on the right?", "A purple triangle is on the right."),
            ("How many shapes are there?", "There are 2 shapes."),
            (
                "What do you see?",
                "The digit 4 at the top, a purple triangle on the right and a yellow star at the \
                 bottom left.",
            ),
        ],
    },
    Case {
        things: &[
            (Shape::Triangle, GREEN, [0, 1]),
            (Shape::Triangle, RED, [1, 0]),
            (Shape::Triangle, BLUE, [2, 2]),
        ],
        background: [235, 238, 245],
        questions: &[
            ("How many triangles are there?", "There are 3 triangles."),
            ("Which digit is shown?", "There is no digit."),
            ("What is at the top left?", "Nothing is at the top left."),
            ("Where is the blue triangle?", "The blue triangle is at the bottom right."),
            ("How many circles are there?", "There are no circles."),
        ],
    },
    Case {
        things: &[(Shape::Star, RED, [1, 1])],
        background: WHITE,
        questions: &[
            ("What colour is the star?", "The star is red."),
            ("What do you see?", "A red star in the middle."),
            ("Where is the star?", "The star is in the middle."),
            ("Point at the star.", "x=0.50 y=0.50"),
            ("How many stars are there?", "There is 1 star."),
            ("What is in the middle?", "A red star is in the middle."),
            ("Is there a red star?", "Yes."),
        ],
    },
    Case {
        things: &[(Shape::Circle, BLUE, [0, 2]), (Shape::Triangle, YELLOW, [2, 0])],
        background: BLACK,
        questions: &[
            ("What colour is the circle?", "The circle is blue."),
            ("What colour is the triangle?", "The triangle is yellow."),
            ("Where is the triangle?", "The triangle is at the top right."),
            ("Where is the circle?", "The circle is at the bottom left."),
            ("How many shapes are there?", "There are 2 shapes."),
            (
                "Describe the picture.",
                "A yellow triangle at the top right and a blue circle at the bottom left.",
            ),
        ],
    },
];

impl Shape {
    /// Whether the shape covers the point at `x` and `y`, which are relative to its center.
    fn covers(self, x: f32, y: f32) -> bool {
        let (u, v) = (x / RADIUS, y / RADIUS);
        match self {
            Self::Circle => u.hypot(v) <= 1.0,
            Self::Square => u.abs().max(v.abs()) <= 1.0,
            Self::Triangle => v <= 1.0 && 2.0 * u.abs() <= v + 1.0,
            Self::Star => {
                let fifth = std::f32::consts::PI / 5.0;
                let angle = u.atan2(-v).rem_euclid(2.0 * fifth);
                let angle = angle.min(2.0 * fifth - angle);
                let (along, across) = (u.hypot(v) * angle.cos(), u.hypot(v) * angle.sin());
                // The vector of the side from the tip at (1, 0) to the corner between two tips.
                let (side_x, side_y) = (0.42 * fifth.cos() - 1.0, 0.42 * fifth.sin());
                (along - 1.0) * side_y <= across * side_x
            }
            Self::Digit(strokes) => strokes.iter().any(|[x0, y0, x1, y1]| {
                let [from_x, to_x] = [x0, x1].map(|x| (2.0 * x - 1.0) * DIGIT_WIDTH);
                let [from_y, to_y] = [y0, y1].map(|y| (y - 1.0) * DIGIT_HEIGHT);
                let (run, rise) = (to_x - from_x, to_y - from_y);
                let along = ((x - from_x) * run + (y - from_y) * rise) / (run * run + rise * rise);
                let along = along.clamp(0.0, 1.0);
                (x - from_x - along * run).hypot(y - from_y - along * rise) <= STROKE
            }),
        }
    }
}

/// Draws a picture of `width` x `height` pixels.
fn draw(case: &Case, width: u32, height: u32) -> DynamicImage {
    RgbImage::from_fn(width, height, |x, y| {
        let (x, y) = ((x as f32 + 0.5) / width as f32, (y as f32 + 0.5) / height as f32);
        let covering = case
            .things
            .iter()
            .find(|(shape, _, [column, row])| shape.covers(x - PLACES[*column], y - PLACES[*row]));
        Rgb(covering.map_or(case.background, |(_, color, _)| *color))
    })
    .into()
}

fn file(picture: &DynamicImage, format: ImageFormat) -> Arc<[u8]> {
    let mut file = Cursor::new(Vec::new());
    picture.write_to(&mut file, format).expect("a file in memory");
    file.into_inner().into()
}

fn builder() -> EngineBuilder {
    Engine::builder().model("demo-vision").num_blocks(4096).threads(1)
}

fn question(image: &Arc<[u8]>, text: &str) -> Request {
    let request = Request::chat(vec![ChatMessage::user(text)]).max_tokens(64).logprobs(0);
    request.image(Arc::clone(image))
}

async fn ask(engine: &Engine, image: &Arc<[u8]>, text: &str) -> Result<Completion, Error> {
    engine.complete(question(image, text)).await
}

/// Goal: the built-in model answers all kinds of questions about drawn pictures; answers have the
/// same bits with a cold and with a warm cache; and only the first question about a picture encodes
/// and computes it.
#[tokio::test]
async fn drawn_pictures_are_understood_cold_and_warm() -> Result<(), Error> {
    let cold = builder().prefix_caching(false).build().await?;
    let warm = builder().build().await?;
    assert!(warm.model_info().takes_images);
    let mut wrong = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let image = file(&draw(case, 192, 192), ImageFormat::Png);
        for (index, (text, expected)) in case.questions.iter().enumerate() {
            let (without, with) =
                (ask(&cold, &image, text).await?, ask(&warm, &image, text).await?);
            if with.text != *expected {
                wrong.push(format!("picture {number}: {text} {}", with.text));
            }
            assert_eq!(bits(&without), bits(&with), "picture {number}: {text}");
            let usage = with.finish.usage;
            assert_eq!(usage.image_tokens, 16);
            assert_eq!(usage.cached_tokens >= usage.image_tokens, index > 0, "{usage:?}");
            assert_eq!(warm.stats().images_encoded, number as u64 + 1, "{text}");
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    warm.audit().await?;
    cold.shutdown().await;
    warm.shutdown().await;
    Ok(())
}

/// Goal: the size, the proportions and the format of the file do not change an answer.
#[tokio::test]
async fn files_of_one_picture_lead_to_one_answer() -> Result<(), Error> {
    let engine = builder().build().await?;
    let mut wrong = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let files = [
            (192, 192, ImageFormat::Png),
            (192, 192, ImageFormat::Jpeg),
            (192, 192, ImageFormat::Bmp),
            (500, 400, ImageFormat::Png),
            (700, 800, ImageFormat::Jpeg),
        ];
        for (width, height, format) in files {
            let image = file(&draw(case, width, height), format);
            for (text, expected) in case.questions {
                let answer = ask(&engine, &image, text).await?.text;
                if answer != *expected {
                    wrong.push(format!("{number}, {width} x {height} {format:?}: {text} {answer}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // PNG and BMP files of the same pixels are one image.
    assert_eq!(engine.stats().images_encoded, 4 * CASES.len() as u64);
    engine.shutdown().await;
    Ok(())
}

/// Goal: a conversation may show a second picture, and questions after it are about that one.
/// Without a picture, the model describes its purpose.
#[tokio::test]
async fn the_latest_picture_counts() -> Result<(), Error> {
    let engine = builder().build().await?;
    let [first, second] =
        [0, 1].map(|index| file(&draw(&CASES[index], 192, 192), ImageFormat::Png));
    let part = |text: &str| {
        stolon::MessageContent::Parts(vec![
            serde_json::json!({"type": "image"}),
            serde_json::json!({"type": "text", "text": text}),
        ])
    };
    let user = |text: &str| ChatMessage { content: Some(part(text)), ..ChatMessage::user("") };
    let messages = [
        user("Which digit is shown?"),
        ChatMessage::assistant("The digit is 7."),
        user("Which digit is shown?"),
        ChatMessage::assistant("The digit is 4."),
        ChatMessage::user("What is on the right?"),
    ];
    for (length, expected) in
        [(1, "The digit is 7."), (3, "The digit is 4."), (5, "A purple triangle is on the right.")]
    {
        let request =
            Request::chat(messages[..length].to_vec()).max_tokens(64).image(first.clone());
        let request = if length > 1 { request.image(second.clone()) } else { request };
        assert_eq!(engine.complete(request).await?.text, expected);
    }
    let hello = Request::chat(vec![ChatMessage::user("Hello!")]).max_tokens(64);
    let answer = engine.complete(hello).await?.text;
    assert!(answer.starts_with("I am a small demo model: show me a picture"), "{answer}");
    engine.shutdown().await;
    Ok(())
}
