//! `stolon demo`: the demonstration of the crate `stolon-demo`, on an engine with the flags' settings.

use clap::Args;
use stolon_demo::Output;

use crate::args::{DEMO, EngineArgs};
use crate::terminal;

/// Arguments of `stolon demo`, all optional.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print the whole handbook instead of its beginning
    #[arg(long)]
    show_handbook: bool,
    /// Ask about a picture instead of a handbook, by default with the model demo-vision
    #[arg(long, conflicts_with = "show_handbook")]
    picture: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

impl DemoArgs {
    /// Runs the demonstration.
    ///
    /// # Errors
    /// Errors of the engine. A wrong answer is shown and is not an error.
    pub async fn run(mut self) -> anyhow::Result<()> {
        if self.picture && self.engine.model == DEMO {
            "demo-vision".clone_into(&mut self.engine.model);
        }
        let engine = self.engine.start().await?;
        let (mut writer, is_styled) = (std::io::stdout(), terminal::is_styled());
        let mut output = Output { writer: &mut writer, is_styled };
        match self.picture {
            true => stolon_demo::run_picture(&engine, &mut output).await?,
            false => stolon_demo::run(&engine, self.show_handbook, &mut output).await?,
        }
        engine.shutdown().await;
        Ok(())
    }
}
