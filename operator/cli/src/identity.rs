//! `mercury identity`: this machine's name, by which others know it.

use clap::Args;
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
    say::Say,
};
use mercury_relocation::identity;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct IdentityArgs {
    /// File with the key; it is made if it is not there
    #[arg(long, value_name = "FILE", default_value = identity::PATH)]
    pub identity: PathBuf,
}

/// This machine's name.
#[derive(Debug, Serialize)]
struct Report {
    /// Public key of this machine. It is no secret.
    name: String,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        to.line(&self.name);
    }
}

/// Prints the name. Makes the key if there is none.
///
/// # Errors
///
/// Returns an error if the file cannot be read or made.
pub fn run(args: &IdentityArgs, say: Say<'_>) -> Result<Exit> {
    access::need_root("identity")?;
    let key = identity::read_or_make(&args.identity)?;
    let name = key.name().map_err(|error| {
        Error::new(Exit::Failed, error.to_string()).hint("remove the file, and run the command again")
    })?;
    Ok(say.done(&Report { name: name.to_string() }))
}
