//! The start of a destination in the restore environment: sets the network up as it was, and waits
//! for a source ([`super::serve`]).

use super::{
    CONFIGURATION, Configuration,
    serve::{Host, RUNNING},
    spare::Here,
};
use crate::{
    migrate::pause::{self, Pause},
    operator::Operator,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    module,
    sysroot::Sysroot,
};
use mercury_migration::{
    protocol::Patience,
    session::{Identity, Receiver},
};
use mercury_quiesce::ethernet;
use std::{fs, net::TcpListener, path::Path, time::Duration};

/// Waits for a machine, and goes on in it. Returns only if that fails.
///
/// # Errors
///
/// Always returns an error if it returns.
pub fn run() -> Result<()> {
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        Error::new(Exit::Failed, format!("{what}: {error}")).hint("this machine restarts")
    };
    let path = Path::new("/").join(CONFIGURATION);
    let text = fs::read(&path).map_err(|error| failed("the configuration", &error))?;
    let configuration: Configuration =
        serde_json::from_slice(&text).map_err(|error| failed("the configuration", &error))?;
    let identity =
        Identity::from_bytes(&configuration.identity).map_err(|error| failed("the identity", &error))?;
    let mut receiver = Receiver::with(&identity).map_err(|error| failed("the identity", &error))?;
    if let Some(known) = &configuration.introduce {
        let introducer = known.introducer().map_err(|error| failed("the identity", &error))?;
        receiver = receiver.introducing(introducer);
    }
    module::insert(None, &Sysroot::default())?;
    let name = ethernet::set_up(&configuration.card).map_err(|error| failed("the network", &error))?;
    let listener = TcpListener::bind(configuration.listen).map_err(|error| failed("the network", &error))?;
    let cards = ethernet::cards(&Sysroot::default());
    let card = cards.into_iter().find(|card| card.name == name);
    eprintln!("mercury: waiting for a machine at {}", configuration.listen);
    let hold = configuration.hold.map(Duration::from_secs);
    let patience = Patience { running: RUNNING, hold, ..Patience::default() };
    let spare = Box::new(Here::open(card, configuration.disks)?);
    let line = Sysroot::default().text("proc/cmdline").unwrap_or_default();
    let [pause, eat] = [pause::WORD, pause::EAT_WORD].map(|word| Pause::of_command_line(&line, word));
    Host::new(receiver, listener, spare, patience, Operator::at_console()).failing(pause, eat).serve()
}
