//! Describes a draft head from its separate files. A head alone is not a model.

use serde_json::Value;

use super::{HeadMemory, InspectOptions, Inspection};
use crate::config::{DraftHeadKind, HeadFiles, eagle3, gemma4_assistant};
use crate::error::ModelError;
use crate::load;
use crate::weights::Weights;

/// A number of layers of a model for which all heads are possible. The head's sizes do not depend on
/// it.
const LAYERS: usize = 64;

impl Inspection {
    /// Adds the description of the head with this `config.json` and these weights. `file` is the name
    /// of the former in error messages. Among the refusals is that it is not a model.
    pub(super) fn add_draft_head(
        &mut self,
        head: HeadFiles,
        (file, json): (&str, &Value),
        weights: Result<Weights, ModelError>,
        options: &InspectOptions,
    ) {
        self.outline.architecture = Some(head.name().to_owned());
        self.refuse(head.no_model(file, json));
        let described = weights.and_then(|mut weights| {
            match head {
                HeadFiles::Eagle3 => load::eagle3::prepare(&mut weights)?,
                HeadFiles::Gemma4 => load::gemma4_assistant::prepare(&mut weights),
            }
            self.of_weights(&weights, None, options);
            let (decoder, kind) = match head {
                HeadFiles::Eagle3 => {
                    let (decoder, config) = eagle3::parse(file, json, LAYERS)?;
                    load::eagle3::check(&weights, &decoder, &config)?;
                    (decoder, DraftHeadKind::Eagle3(config))
                }
                HeadFiles::Gemma4 => {
                    let (decoder, config) = gemma4_assistant::parse(file, json)?;
                    load::gemma4_assistant::check(&weights, &decoder, &config)?;
                    (decoder, DraftHeadKind::Gemma4(config))
                }
            };
            self.outline.set(&decoder);
            let is_read = |name: &str| !["d2t", "t2d"].contains(&name);
            Ok(HeadMemory::of((&decoder, &kind), &weights, is_read, options))
        });
        match described {
            Ok(memory) => self.draft_head = Some(memory),
            Err(error) => self.refuse(error),
        }
    }
}
