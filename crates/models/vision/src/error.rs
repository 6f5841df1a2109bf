//! Why a picture cannot be used.

/// Why a picture cannot be used. Every variant is about the picture, so whoever sent it can act on
/// it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    /// The content is in none of the supported formats.
    #[error("the picture has an unknown format: expected PNG, JPEG, WebP, GIF or BMP")]
    UnknownFormat,
    /// A size exceeds its limit.
    #[error("the picture is too large: expected at most {max} {what}, got {got}")]
    TooLarge {
        /// The name of the size that is too large, with its unit.
        what: &'static str,
        /// The limit.
        max: u64,
        /// The size.
        got: u64,
    },
    /// The picture is so narrow that the model's processor refuses it.
    #[error("the picture has the wrong shape: expected {expected}, got {width} x {height} pixels")]
    Shape {
        /// The accepted shapes.
        expected: String,
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
    },
    /// The content does not conform to its format, or is cut off.
    #[error("the picture cannot be decoded as {format}: {reason}")]
    Malformed {
        /// The format.
        format: &'static str,
        /// A description of the defect.
        reason: String,
    },
    /// The content uses an option of its format that is not implemented.
    #[error("the picture cannot be decoded as {format}: {reason} is not supported")]
    Unsupported {
        /// The format.
        format: &'static str,
        /// The option.
        reason: String,
    },
}
