//! Describes an EAGLE-3 head, which is no model by itself.

use serde_json::Value;

use super::{HeadMemory, InspectOptions, Inspection};
use crate::config::eagle3::{no_model, parse};
use crate::error::ModelError;
use crate::load::eagle3::{check, prepare};
use crate::weights::Weights;

/// A number of layers of a model for which all heads are possible. The head's sizes do not depend on
/// it.
const LAYERS: usize = 64;

impl Inspection {
    /// Adds the description of the head with this `config.json` and these weights. `file` is the name
    /// of the former in error messages. Among the refusals is that it is not a model.
    pub(super) fn add_eagle3(
        &mut self,
        file: &str,
        json: &Value,
        weights: Result<Weights, ModelError>,
        options: &InspectOptions,
    ) {
        self.outline.architecture = Some("eagle3".to_owned());
        self.refuse(no_model(file, json));
        let described = weights.and_then(|mut weights| {
            prepare(&mut weights)?;
            self.of_weights(&weights, None, options);
            let (decoder, config) = parse(file, json, LAYERS)?;
            check(&weights, &decoder, &config)?;
            self.outline.set(&decoder);
            let is_read = |name: &str| !["d2t", "t2d"].contains(&name);
            Ok(HeadMemory::of(&decoder, &weights, is_read, options))
        });
        match described {
            Ok(memory) => self.eagle3 = Some(memory),
            Err(error) => self.refuse(error),
        }
    }
}
