//! `mercury receive`: makes this machine the destination of a move.
//!
//! Only a small kernel can receive a machine, because all memory beyond the kernel's own must be
//! free. [`environment`] makes a restore environment, with the network as it is now. Before it is
//! started, the pairing token that `mercury migrate` needs is printed. In the restore environment
//! [`host`] waits, receives the machine, and goes on in it.
//!
//! [`beside`] is the start of a destination that stays in use: the machine goes on as a guest of it.

/// Prints a line for the operator, without control characters: a part may be the source's. A reader that is
/// gone is no reason to fail.
macro_rules! note {
    ($($text:tt)*) => {{
        let text = $crate::plain::plain(&format!($($text)*));
        // The tests' harness keeps what is printed by the macro.
        #[cfg(test)]
        eprintln!("{text}");
        #[cfg(not(test))]
        {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "{text}");
        }
    }};
}

pub mod beside;
mod disks;
pub mod files;
mod host;
#[cfg(test)]
mod hostile;
mod intake;
mod room;
mod serve;
#[cfg(test)]
mod slow;
pub mod spare;
mod start;
#[cfg(test)]
mod streams;

use crate::{
    host::PORT,
    migrate::disk::{self, Disk},
    options::ReceiveOptions,
    restore::{
        Prepared,
        environment::{self, Purpose},
        init,
    },
};
use mercury_control::{
    access,
    error::{Error, Result},
    exit::Exit,
    interrupt::Deferred,
    lockdown,
    output::{Render, Text},
    say::Say,
    sysroot::Sysroot,
};
use mercury_migration::session::{Identity, Introducer};
use mercury_quiesce::ethernet::{self, Card};
use serde::{Deserialize, Serialize};
use std::{
    net::{Ipv4Addr, SocketAddrV4},
    thread,
    time::{Duration, Instant, SystemTime},
};

/// File with the restore environment's task.
const CONFIGURATION: &str = "receive.json";
/// Line in the boot menu. It names no address, so a new entry takes the place of the one before,
/// whose pairing token is no longer known.
const MENU_TITLE: &str = "Mercury: receive a machine";
/// Lifetime of a pairing token that is told to known machines alone.
const FOR_KNOWN: Duration = Duration::from_secs(10 * 365 * 86_400);
/// Divisor of the machine's memory for the size of the restore environment: hashes need 16 bytes a
/// page, and some room.
const MEMORY_PART: u64 = 200;
/// Memory in MiB that the restore environment needs besides.
const MEMORY_LEAST: u64 = 128;

/// The task of the restore environment.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Configuration {
    /// Key of the receiver: [`Identity`].
    identity: Vec<u8>,
    /// Machines that are told the pairing token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    introduce: Option<Introduce>,
    listen: SocketAddrV4,
    card: Card,
    /// Disks that a machine may overwrite.
    disks: Vec<Disk>,
    /// Seconds to wait for the verdict on a complete arrival; `None` waits until the operator
    /// decides.
    hold: Option<u64>,
}

/// An [`Introducer`] as text.
#[derive(Clone, Serialize, Deserialize)]
struct Introduce {
    key: String,
    sources: Vec<String>,
}

/// Keeps the key out of logs.
impl std::fmt::Debug for Introduce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Introduce").field("sources", &self.sources).finish_non_exhaustive()
    }
}

impl Introduce {
    fn new(introducer: &Introducer) -> Self {
        let sources = introducer.sources.iter().map(ToString::to_string).collect();
        Self { key: introducer.key.secret_text(), sources }
    }

    fn introducer(&self) -> std::result::Result<Introducer, mercury_migration::session::Error> {
        let sources = self.sources.iter().map(|name| name.parse()).collect::<std::result::Result<_, _>>()?;
        Ok(Introducer { key: self.key.parse()?, sources })
    }
}

/// The prepared destination.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Pairing token for `mercury migrate`; none if only known machines are told.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// Name of this machine, by which known machines move here.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    address: SocketAddrV4,
    /// Lifetime of token and address, from now on.
    lifetime_seconds: u64,
    /// Files of the restore environment, if another program starts it.
    #[serde(flatten)]
    prepared: Option<Prepared>,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        let port =
            if self.address.port() == PORT { String::new() } else { format!(":{}", self.address.port()) };
        to.line("on the machine that is to move here:");
        let way = match (&self.key, &self.name) {
            (Some(key), _) => format!("--key {key}"),
            (None, name) => format!("--spare {}", name.as_deref().unwrap_or_default()),
        };
        to.line(format!("  mercury migrate {}{port} {way}", self.address.ip()));
        if let Some(prepared) = &self.prepared {
            let minutes = self.lifetime_seconds / 60;
            // A name does not expire.
            let good = match &self.key {
                Some(_) => {
                    format!("good for {} h {} min from now on (--lifetime), ", minutes / 60, minutes % 60)
                }
                None => String::new(),
            };
            to.line(format!("{good}once this machine, or"));
            to.line(
                "one with the same address, has been started with these, \
                by a boot loader or from the network:",
            );
            prepared.render(to);
        }
    }
}

/// Prepares this machine, and starts the restore environment.
///
/// # Errors
///
/// Returns an error if this machine cannot receive, or the command is interrupted. Nothing was
/// given up then.
pub fn run(args: &ReceiveOptions, say: Say<'_>) -> Result<Exit> {
    access::need_root("receive")?;
    if args.here {
        return host::run().map(|()| Exit::Done);
    }
    let sysroot = Sysroot::default();
    if args.prepare.is_none() {
        lockdown::refuse_restore("receive", &sysroot)?;
    }
    let card = choose(args, ethernet::cards(&sysroot))?;
    let named = args.listen.map(|listen| *listen.0.ip()).filter(|ip| !ip.is_unspecified());
    let address = named.unwrap_or(card.addresses[0].0);
    let listen = SocketAddrV4::new(address, args.listen.map_or(PORT, |listen| listen.0.port()));
    let introducer = introducer(args)?;
    let lifetime = if introducer.is_some() { FOR_KNOWN } else { args.lifetime.0 };
    let (identity, line) = Identity::new(SystemTime::now(), lifetime).map_err(unchanged)?;
    let name = introducer.as_ref().map(|introducer| introducer.key.name()).transpose().map_err(unchanged)?;
    let disks = disks::give(&args.disk, args.force_disk, &sysroot)?;
    let more = disk::memory(&disks.iter().map(|disk| disk.bytes).collect::<Vec<_>>());
    let cards = vec![card.name.clone()];
    let configuration = Configuration {
        identity: identity.to_bytes(),
        introduce: introducer.as_ref().map(Introduce::new),
        listen,
        card,
        disks,
        hold: (!args.hold_for_ever).then_some(600),
    };
    let file = serde_json::to_vec(&configuration)
        .map_err(|error| Error::fault(format!("the configuration cannot be written as JSON: {error}")))?;
    let purpose = Purpose {
        memory: args.memory,
        usual_memory: memory(&sysroot) + more,
        module: args.module.as_deref(),
        words: vec![init::RECEIVE.to_owned()],
        // A machine that arrives may have a file system on a disk that this machine only reaches,
        // or bring one onto a given disk.
        disks: mercury_quiesce::block_devices::real(&sysroot),
        cards,
        files: vec![(CONFIGURATION, file)],
        menu_title: args.boot_menu.then(|| MENU_TITLE.to_owned()),
        ..Purpose::default()
    };
    let mut report = Report {
        key: introducer.is_none().then(|| line.to_string()),
        name: name.map(|name| name.to_string()),
        address: listen,
        lifetime_seconds: lifetime.as_secs(),
        prepared: None,
    };
    if let Some(folder) = &args.prepare {
        report.prepared = Some(environment::write(&purpose, folder, &sysroot)?);
        say.done(&report);
        return Ok(Exit::Done);
    }
    let deferred = Deferred::begin();
    let ready = environment::load(&environment::make(&purpose, &sysroot)?, &sysroot)?;
    say.done(&report);
    eprintln!("this system and everything on it ends in {} s; Ctrl-C keeps it", args.delay.0.as_secs());
    let end = Instant::now() + args.delay.0;
    while Instant::now() < end {
        if deferred.requested() {
            environment::unload(ready);
            return Err(Error::new(Exit::Interrupted, "interrupted: this machine goes on as it was"));
        }
        thread::sleep(Duration::from_millis(50));
    }
    environment::start(ready)?;
    Ok(Exit::Done)
}

fn unchanged(error: mercury_migration::session::Error) -> Error {
    Error::new(Exit::Failed, error.to_string()).hint("nothing was changed")
}

/// Returns this machine's key with the machines that may move here, if any are named.
fn introducer(args: &ReceiveOptions) -> Result<Option<Introducer>> {
    if args.source.is_empty() {
        return Ok(None);
    }
    let key = crate::identity::read_or_make(&args.identity)?;
    Ok(Some(Introducer { key, sources: args.source.clone() }))
}

/// Chooses the card that the machine will arrive by.
fn choose(args: &ReceiveOptions, cards: Vec<Card>) -> Result<Card> {
    let mut usable: Vec<_> = cards.into_iter().filter(|card| card.up && !card.addresses.is_empty()).collect();
    if let Some(listen) = args.listen.filter(|listen| !listen.0.ip().is_unspecified()) {
        let ip = *listen.0.ip();
        return ethernet::card_for(&usable, ip).cloned().ok_or_else(|| {
            Error::new(Exit::Failed, format!("no Ethernet card of this machine has the address {ip}"))
                .hint("name an address that `ip address` shows; bonds, bridges and VLANs cannot be used")
        });
    }
    if usable.iter().any(|card| card.gateway.is_some()) {
        usable.retain(|card| card.gateway.is_some());
    }
    match usable.len() {
        0 => Err(Error::new(Exit::Impossible, "no Ethernet card of this machine is up with an IPv4 address")
            .hint("give one an address; bonds, bridges, VLANs and IPv6 cannot be used yet")),
        1 if usable[0].addresses.len() == 1 => Ok(usable.remove(0)),
        _ => {
            let all = usable.iter().flat_map(|card| &card.addresses);
            let all: Vec<_> = all.map(|(address, _): &(Ipv4Addr, u8)| address.to_string()).collect();
            Err(Error::new(Exit::Usage, format!("there are several addresses: {}", all.join(", ")))
                .hint("choose one with --listen ADDRESS"))
        }
    }
}

/// Returns the memory for the restore environment in MiB, by the size of this machine.
fn memory(sysroot: &Sysroot) -> u64 {
    let meminfo = sysroot.text("proc/meminfo").unwrap_or_default();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = total.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0);
    (MEMORY_LEAST + kib / 1024 / MEMORY_PART).next_multiple_of(16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::Listen;
    use std::fs;

    fn card(name: &str, address: Option<[u8; 4]>, gateway: Option<[u8; 4]>) -> Card {
        Card {
            name: name.into(),
            mac: [2; 6],
            place: String::new(),
            index: 2,
            up: true,
            addresses: address.map(|address| (address.into(), 24)).into_iter().collect(),
            gateway: gateway.map(Into::into),
        }
    }

    #[test]
    fn the_card_in_use_is_chosen() {
        let mut args = ReceiveOptions::default();
        let (plain, other) = (card("a", Some([10, 0, 0, 1]), None), card("b", Some([10, 1, 0, 1]), None));
        let out = card("c", Some([10, 2, 0, 1]), Some([10, 2, 0, 9]));
        assert!(choose(&args, vec![card("x", None, None)]).is_err());
        assert_eq!(choose(&args, vec![plain.clone()]).expect("one"), plain);
        let both = choose(&args, vec![plain.clone(), other.clone()]).expect_err("two");
        assert!(both.message.contains("10.0.0.1, 10.1.0.1"), "{both}");
        assert_eq!(choose(&args, vec![plain.clone(), out.clone()]).expect("one has a gateway"), out);
        let mut two = plain.clone();
        two.addresses.push(([10, 3, 0, 1].into(), 24));
        assert!(choose(&args, vec![two]).is_err());
        args.listen = Some("10.1.0.1".parse().expect("an address"));
        assert_eq!(choose(&args, vec![plain.clone(), other.clone()]).expect("named"), other);
        assert!(choose(&args, vec![plain]).is_err());
    }

    #[test]
    fn known_machines_are_carried_to_the_restore_environment() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = |file: &str| crate::identity::read_or_make(&folder.path().join(file)).expect("a key");
        let source = key("source").name().expect("a name");
        let mut args = ReceiveOptions { identity: folder.path().join("spare"), ..ReceiveOptions::default() };
        assert!(introducer(&args).expect("none").is_none());
        args.source = vec![source];
        let introducer = introducer(&args).expect("a key").expect("known machines");
        let text = serde_json::to_string(&Introduce::new(&introducer)).expect("JSON");
        let carried: Introduce = serde_json::from_str(&text).expect("JSON");
        assert!(!format!("{carried:?}").contains("mercury-identity"), "{carried:?}");
        let carried = carried.introducer().expect("an introducer");
        assert_eq!((carried.sources, carried.key.name().ok()), (vec![source], key("spare").name().ok()));
    }

    #[test]
    fn where_it_listens() {
        let of = |text: &str| text.parse().map(|Listen(found)| found.to_string());
        for (text, found) in [
            ("10.9.0.3", "10.9.0.3:4747"),
            ("10.9.0.3:99", "10.9.0.3:99"),
            ("0.0.0.0:99", "0.0.0.0:99"),
            ("[::ffff:10.9.0.3]:99", "10.9.0.3:99"),
        ] {
            assert_eq!(of(text).as_deref(), Ok(found));
        }
        for text in ["[::1]:99", "::1", "::", "[::]:4747", "fe80::1%eth0"] {
            assert!(of(text).is_err_and(|why| why.contains("IPv4 addresses only")), "{text}: {:?}", of(text));
        }
        assert!(of("fe80::1").is_err_and(|why| why.contains("IPv4 addresses only")));
        assert!(of("spare").is_err_and(|why| why.contains("such as")));
    }

    #[test]
    fn larger_machines_need_larger_kernels() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("proc")).expect("a folder");
        let with = |gib: u64| {
            let text = format!("MemTotal: {:>14} kB\nMemFree: 1 kB\n", gib << 20);
            fs::write(folder.path().join("proc/meminfo"), text).expect("a file");
            memory(&Sysroot::at(folder.path()))
        };
        assert_eq!(with(1), 144);
        // 16 bytes for each page.
        assert!((with(64) - MEMORY_LEAST) << 20 >= (64 << 30) / 4096 * 16);
    }
}
