//! The start of a destination that stays in use: `mercury receive --beside`. A monitor runs the machine that
//! arrives as a guest of this system. The monitor is the [`Spare`] of the loop in [`super::serve`].

use super::{
    Report,
    serve::{Host, RUNNING},
    spare::Spare,
};
use crate::{host::PORT, operator::Operator, values::Listen};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_migration::{protocol::Patience, session::Receiver};
use mercury_quiesce::ethernet;
use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpListener},
    time::Duration,
};

/// Time for which a complete arrival is kept if its source falls silent.
const HOLD: Duration = Duration::from_secs(600);

/// A door that one machine may come through.
pub struct Door {
    receiver: Receiver,
    listener: TcpListener,
    report: Report,
}

impl Door {
    /// Waits at an address, or at all addresses of this system, with a new pairing token.
    ///
    /// # Errors
    ///
    /// Returns an error if another program waits there, or this system has no network.
    pub fn open(listen: Option<Listen>, lifetime: Duration) -> Result<Self> {
        let port = listen.map_or(PORT, |listen| listen.0.port());
        let named = listen.map(|listen| *listen.0.ip()).filter(|ip| !ip.is_unspecified());
        let shown = named.or_else(own_address).ok_or_else(|| {
            Error::new(Exit::Impossible, "no Ethernet interface of this system is up with an IPv4 address")
                .hint("give one an address, or name another with --listen ADDRESS")
        })?;
        let at = SocketAddrV4::new(named.unwrap_or(Ipv4Addr::UNSPECIFIED), port);
        let listener = TcpListener::bind(at).map_err(|error| occupied(at, &error))?;
        let (receiver, token) = Receiver::new(lifetime)
            .map_err(|error| Error::new(Exit::Failed, error.to_string()).hint("nothing was changed"))?;
        let report = Report {
            key: Some(token.to_string()),
            name: None,
            address: SocketAddrV4::new(shown, port),
            lifetime_seconds: lifetime.as_secs(),
            prepared: None,
        };
        Ok(Self { receiver, listener, report })
    }

    /// Returns the text with the pairing token for the operator of the source.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Receives a machine into `spare`, and answers its source until that knows. A complete arrival whose
    /// source is silent is kept for ten minutes, or until the operator decides. Returns when a machine runs
    /// and its source asks no more, or when the machine has ended.
    ///
    /// # Errors
    ///
    /// Returns an error if nothing can be received any more.
    pub fn serve(self, spare: Box<dyn Spare>, hold_for_ever: bool) -> Result<()> {
        let hold = (!hold_for_ever).then_some(HOLD);
        let patience = Patience { running: RUNNING, hold, ..Patience::default() };
        Host::new(self.receiver, self.listener, spare, patience, Operator::default()).serve_beside()
    }
}

/// Returns the address by which other machines reach this system: on the network with a gateway, if a card
/// has one.
fn own_address() -> Option<Ipv4Addr> {
    let sysroot = Sysroot::default();
    let cards = ethernet::cards(&sysroot);
    let with_gateway = cards.iter().find(|card| card.up && card.gateway.is_some());
    let of_card = with_gateway.and_then(|card| card.addresses.first()).map(|(address, _)| *address);
    let of_any = || {
        let mut all = ethernet::interfaces(&sysroot).into_iter().flat_map(|one| one.addresses);
        all.find_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        })
    };
    of_card.or_else(of_any)
}

fn occupied(at: SocketAddrV4, error: &io::Error) -> Error {
    let plain = Error::new(Exit::Failed, format!("cannot wait at {at}: {error}"));
    if error.kind() == io::ErrorKind::AddrInUse {
        return plain.hint("another machine is awaited there; name another port with --listen ADDRESS:PORT");
    }
    plain.hint("name an address of this system with --listen ADDRESS")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_machines_need_two_ports() {
        let loopback = Listen(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));
        let lifetime = Duration::from_secs(60);
        let door = Door::open(Some(loopback), lifetime).expect("a door");
        let there = door.listener.local_addr().expect("an address");
        let again = format!("127.0.0.1:{}", there.port()).parse().expect("an address");
        let refused = Door::open(Some(again), lifetime).err().expect("refused");
        assert!(refused.message.contains("cannot wait at 127.0.0.1"), "{refused}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("another port")));
        assert!(door.report().key.as_ref().is_some_and(|key| key.len() > 20));
    }
}
