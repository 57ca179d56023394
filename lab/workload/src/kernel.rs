//! The test module: a command in words, an answer in lines of a name and a value.

use std::{
    fs::OpenOptions,
    io::{Read, Write},
};

use serde_json::Value;

use crate::{Result, cpus, report::Report};

const PATH: &str = "/dev/mercury_test";

/// What to ask of it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Ask from this CPU
    #[arg(long)]
    on: Option<usize>,
    /// The command's words
    #[arg(required = true)]
    words: Vec<String>,
}

/// Asks, and reports the answer.
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

/// Decimal numbers are numbers; 64 bits of anything else stay text.
fn value(text: &str) -> Value {
    text.parse::<u64>().map_or_else(|_| text.into(), Value::from)
}
