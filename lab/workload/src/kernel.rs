//! The test module's interface: a command in words, and an answer in lines of a name and a value.

use std::{
    fs::OpenOptions,
    io::{Read, Write},
};

use serde_json::Value;

use crate::{Result, cpus, report::Report};

const PATH: &str = "/dev/mercury_test";

/// The command to give.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Give the command from this CPU
    #[arg(long)]
    on: Option<usize>,
    /// The command's words
    #[arg(required = true)]
    words: Vec<String>,
}

/// Gives the command, and reports the answer.
pub fn run(args: &Args, report: &mut Report) -> Result<()> {
    if let Some(cpu) = args.on {
        cpus::pin(cpu)?;
    }
    let mut module = OpenOptions::new().read(true).write(true).open(PATH)?;
    module.write_all(args.words.join(" ").as_bytes())?;
    let mut answer = String::new();
    module.read_to_string(&mut answer)?;
    for line in answer.lines() {
        let (name, text) = line.split_once(' ').unwrap_or((line, ""));
        report.fact(name, value(text));
    }
    report.pass();
    Ok(())
}

/// Reads a value. Decimal numbers become numbers; 64 bits of anything else stay text.
fn value(text: &str) -> Value {
    text.parse::<u64>().map_or_else(|_| text.into(), Value::from)
}
