//! In the small kernel: the network as it was, and then who comes ([`super::serve`]).

use super::{CONFIGURATION, Configuration, serve::Host};
use crate::{
    error::{Error, Result},
    ethernet::{self, Card},
    exit::Exit,
    module,
    sysroot::Sysroot,
};
use mercury_migration::session::{Identity, Receiver};
use std::{
    fs,
    net::TcpListener,
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// How long the card may take to be there.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for a machine, and goes on in it. Returns only if that cannot be.
///
/// # Errors
/// Always, then.
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
    let receiver = Receiver::with(&identity).map_err(|error| failed("the identity", &error))?;
    module::insert(None, &Sysroot::default())?;
    let name = connect(&configuration.card).map_err(|error| failed("the network", &error))?;
    let listener = TcpListener::bind(configuration.listen).map_err(|error| failed("the network", &error))?;
    let cards = ethernet::cards(&Sysroot::default());
    let card = cards.into_iter().find(|card| card.name == name);
    eprintln!("mercury: waiting for a machine at {}", configuration.listen);
    let hold = configuration.hold.map(Duration::from_secs);
    Host::new(receiver, listener, card, hold)?.serve()
}

/// Sets the network up as it was; the card's name, which may be another one.
fn connect(was: &Card) -> std::io::Result<String> {
    let end = Instant::now() + PATIENCE;
    let name = loop {
        let cards = ethernet::cards(&Sysroot::default());
        if let Some(card) = cards.into_iter().find(|card| card.mac == was.mac) {
            break card.name;
        }
        if Instant::now() > end {
            return Err(std::io::Error::other(format!("the card that was {} is not there", was.name)));
        }
        thread::sleep(Duration::from_millis(50));
    };
    ethernet::bring_up("lo")?;
    ethernet::configure(&name, &was.addresses)?;
    if let Some(Err(error)) = was.gateway.map(ethernet::route_by) {
        eprintln!("mercury: only this network can be reached: {error}");
    }
    Ok(name)
}
