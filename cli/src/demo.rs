//! `stolon demo`: the demonstration of the crate `stolon-demo`, on an engine with the flags' settings.

use clap::Args;
use stolon_demo::Output;

use crate::args::EngineArgs;
use crate::terminal;

/// Arguments of `stolon demo`, all optional.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Print the whole handbook instead of its beginning
    #[arg(long)]
    show_handbook: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

impl DemoArgs {
    /// Runs the demonstration.
    ///
    /// # Errors
    /// Errors of the engine. A wrong answer is shown and is not an error.
    pub async fn run(self) -> anyhow::Result<()> {
        let engine = self.engine.start().await?;
        let (mut writer, is_styled) = (std::io::stdout(), terminal::is_styled());
        let mut output = Output { writer: &mut writer, is_styled };
        stolon_demo::run(&engine, self.show_handbook, &mut output).await?;
        engine.shutdown().await;
        Ok(())
    }
}
