//! The configuration of cards that are gone, for the cards that came in their place: a machine that goes on
//! as a guest has lost its own cards, with their addresses and routes, and has got others.
//!
//! The kernel forgets what belongs to a card when the card goes. So all of it is kept before the instant, as
//! the kernel's own messages (rtnetlink(7)), and is sent back for the new card. Rules are kept by the kernel:
//! it finds the card again by its name.

use super::{Card, bring_up, cards, packets};
use mercury_control::sysroot::Sysroot;
use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::FromRawFd,
};

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
/// Length of a message's header.
const HEADER: usize = 16;
/// Length of `struct ifinfomsg`, and its attributes.
const LINK: usize = 16;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
/// Name of the device that an interface belongs to; for a device on PCI it is the address.
const IFLA_PARENT_DEV_NAME: u16 = 56;
/// Offset of the flags in `struct ifinfomsg`.
const LINK_FLAGS_AT: usize = 8;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
/// Lengths of `struct ifaddrmsg` and `struct ndmsg`.
const ADDRESS: usize = 8;
/// Offset of the scope in `struct ifaddrmsg`.
const SCOPE_AT: usize = 3;
const NEIGHBOUR: usize = 12;
/// Length of `struct rtmsg`, and its fields and attributes.
const ROUTE: usize = 12;
const ROUTE_BITS_AT: usize = 1;
const PROTOCOL_AT: usize = 5;
const ROUTE_FLAGS_AT: usize = 8;
const RTPROT_KERNEL: u8 = 2;
const RTM_F_CLONED: u32 = 0x200;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_VIA: u16 = 18;
/// `struct ndmsg`: a neighbour that an operator has named.
const STATE_AT: usize = 8;
const NUD_PERMANENT: u16 = 0x80;
/// A message of the kernel's: its type and its payload.
type Message = (u16, Vec<u8>);

/// A card with its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kept {
    card: Card,
    mtu: u32,
    /// Index of the bridge or of the bond that the card is a part of.
    whole: Option<u32>,
    /// Addresses, then routes, then neighbours.
    messages: Vec<Message>,
    /// True if a default route leads by this card, or by the bridge or the bond that it is a part of.
    leads_out: bool,
}

/// The configuration of all cards.
#[derive(Debug)]
pub struct Configuration(Vec<Kept>);

/// Keeps the configuration of all cards.
///
/// # Errors
///
/// Returns an error if the kernel does not tell it.
pub fn keep(sysroot: &Sysroot) -> io::Result<Configuration> {
    let mut netlink = Netlink::open()?;
    let mut all = netlink.dump(RTM_GETADDR, ADDRESS)?;
    all.extend(by_way(netlink.dump(RTM_GETROUTE, ROUTE)?));
    all.extend(netlink.dump(RTM_GETNEIGH, NEIGHBOUR)?);
    let kept = |card: Card| {
        let number = |file: &str| {
            sysroot.text(&format!("sys/class/net/{}/{file}", card.name)).and_then(|text| text.parse().ok())
        };
        let (own, whole) = (card.index.cast_unsigned(), number("master/ifindex"));
        let messages = all.iter().filter(|message| belongs(message, own)).cloned();
        Kept {
            mtu: number("mtu").unwrap_or(0),
            whole,
            messages: messages.collect(),
            leads_out: [Some(own), whole].into_iter().flatten().any(|index| leads_out(&all, index)),
            card,
        }
    };
    Ok(Configuration(cards(sysroot).into_iter().map(kept).collect()))
}

impl Configuration {
    /// Gives new cards the names and the configuration of cards that are gone. A card at the place that
    /// `metal` has for a name gets that one. The others come in the order of [`Kept::rank`].
    /// Returns what did not succeed.
    #[must_use]
    pub fn take_over(&self, metal: &[Card], now: &[Card]) -> Vec<String> {
        let mut told = Vec::new();
        for (kept, card) in self.pairs(now, metal) {
            match card {
                Some(card) => told.extend(kept.move_to(card)),
                None if kept.card.up => {
                    told.push(format!("no network card came in the place of {}", kept.card.name));
                }
                None => {}
            }
        }
        told
    }

    /// Pairs the cards that are gone with cards that came.
    fn pairs<'a>(&'a self, now: &'a [Card], metal: &[Card]) -> Vec<(&'a Kept, Option<&'a Card>)> {
        let is_gone = |kept: &&Kept| !now.iter().any(|card| card.index == kept.card.index);
        let mut gone: Vec<_> = self.0.iter().filter(is_gone).collect();
        gone.sort_by_key(|kept| kept.rank());
        let came = |card: &&Card| !self.0.iter().any(|kept| kept.card.index == card.index);
        let mut new: Vec<&Card> = now.iter().filter(came).collect();
        let place = |name: &str| metal.iter().find(|card| card.name == name).map(|card| &card.place);
        let at_its_place: Vec<_> = gone
            .iter()
            .map(|kept| {
                let wanted = place(&kept.card.name)?;
                let at = new.iter().position(|card| card.place == *wanted)?;
                Some(new.remove(at))
            })
            .collect();
        let mut rest = new.into_iter();
        gone.into_iter().zip(at_its_place).map(|(kept, card)| (kept, card.or_else(|| rest.next()))).collect()
    }
}

/// Place of a card among those that wait for another one: the smallest is the first.
type Rank = (bool, bool, bool);

impl Kept {
    /// Returns the place among cards that wait for another one. Those that were up come first: of them those
    /// by which the machine reaches other networks, then those with an address, or in a bridge or a bond.
    /// Cards of one rank come in the order of their names.
    fn rank(&self) -> Rank {
        let is_in_use = self.whole.is_some() || self.messages.iter().any(is_global_address);
        (!self.card.up, !self.leads_out, !is_in_use)
    }

    /// Configures another card like this one. Returns what did not succeed.
    fn move_to(&self, card: &Card) -> Vec<String> {
        let name = &self.card.name;
        let mut told = Vec::new();
        let mut tell = |what: &str, result: io::Result<()>| {
            told.extend(result.err().map(|error| format!("{name}: {what} did not come back: {error}")));
        };
        let mut netlink = match Netlink::open() {
            Ok(netlink) => netlink,
            Err(error) => return vec![format!("{name}: the kernel cannot be told: {error}")],
        };
        tell("its name", netlink.change(link(card.index, &[(IFLA_IFNAME, &with_nul(name))])));
        if self.mtu != 0 {
            tell("its MTU", netlink.change(link(card.index, &[(IFLA_MTU, &self.mtu.to_ne_bytes())])));
        }
        if let Some(whole) = self.whole {
            let whole = [(IFLA_MASTER, &whole.to_ne_bytes()[..])];
            tell("its place in a bridge", netlink.change(link(card.index, &whole)));
        }
        if self.card.up {
            tell("its link", bring_up(name));
        }
        for message in &self.messages {
            let what = match message.0 {
                RTM_NEWADDR => "an address",
                RTM_NEWROUTE => "a route",
                _ => "a neighbour",
            };
            let own = self.card.index.cast_unsigned();
            tell(what, netlink.change(moved(message, own, card.index.cast_unsigned())));
        }
        if self.card.up {
            // Peers that miss the announcement ask for the address.
            let _ = packets::announce(&Card { index: card.index, mac: card.mac, ..self.card.clone() });
        }
        told
    }
}

fn with_nul(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// Lists the Ethernet cards by the kernel's messages. No path is looked up: the root may be behind a card
/// that has no address yet. The kernel does not tell ports, so a place is that of the first port.
///
/// # Errors
///
/// Returns an error if the kernel does not tell them.
pub fn links() -> io::Result<Vec<Card>> {
    let all = Netlink::open()?.dump(RTM_GETLINK, LINK)?;
    Ok(all.iter().filter_map(|(kind, payload)| link_of(*kind, payload)).collect())
}

/// Parses a message about an Ethernet card. Interfaces that a driver makes without a device say so.
fn link_of(kind: u16, payload: &[u8]) -> Option<Card> {
    let ethernet = [libc::ARPHRD_ETHER as u8, 0];
    if kind != RTM_NEWLINK || payload.get(2..4)? != ethernet {
        return None;
    }
    let found = attributes(payload, LINK);
    let value = |wanted| found.iter().find(|(kind, _)| *kind == wanted).map(|(_, at)| &payload[at.clone()]);
    if value(IFLA_LINKINFO).is_some() {
        return None;
    }
    let text = |wanted| {
        let bytes = value(wanted)?.split(|byte| *byte == 0).next()?;
        Some(String::from_utf8_lossy(bytes).into_owned())
    };
    Some(Card {
        name: text(IFLA_IFNAME)?,
        place: format!("{} 0", text(IFLA_PARENT_DEV_NAME).unwrap_or_default()),
        mac: value(IFLA_ADDRESS)?.try_into().ok()?,
        index: word(payload, 4)?.cast_signed(),
        up: word(payload, LINK_FLAGS_AT)? & libc::IFF_UP.cast_unsigned() != 0,
        ..Card::default()
    })
}

/// Returns a message that changes a link.
fn link(index: i32, attributes: &[(u16, &[u8])]) -> Message {
    let mut payload = vec![0; LINK];
    payload[4..8].copy_from_slice(&index.to_ne_bytes());
    for (kind, value) in attributes {
        payload.extend((value.len() as u16 + 4).to_ne_bytes());
        payload.extend(kind.to_ne_bytes());
        payload.extend(*value);
        payload.resize(payload.len().next_multiple_of(4), 0);
    }
    (RTM_NEWLINK, payload)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Returns the offsets of the attributes after a structure of this length: kind, and where the value lies.
fn attributes(payload: &[u8], mut at: usize) -> Vec<(u16, std::ops::Range<usize>)> {
    let mut found = Vec::new();
    while let Some(head) = word(payload, at) {
        // Length and kind are halves of one word.
        let head = head.to_ne_bytes();
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]);
        if length < 4 || at + length > payload.len() {
            break;
        }
        found.push((kind & 0x3FFF, at + 4..at + length));
        at += length.next_multiple_of(4);
    }
    found
}

/// Returns the place of a card's index in a message; `None` if the kernel makes the rest itself.
fn index_at(message: &Message) -> Option<usize> {
    let (kind, payload) = message;
    match *kind {
        RTM_NEWADDR => Some(4),
        RTM_NEWNEIGH => {
            let state = u16::from_ne_bytes([*payload.get(STATE_AT)?, *payload.get(STATE_AT + 1)?]);
            (state & NUD_PERMANENT != 0).then_some(4)
        }
        RTM_NEWROUTE => {
            let is_kept = *payload.get(PROTOCOL_AT)? != RTPROT_KERNEL
                && word(payload, ROUTE_FLAGS_AT)? & RTM_F_CLONED == 0;
            let place = attributes(payload, ROUTE).into_iter().find(|(kind, _)| *kind == RTA_OIF);
            place.map(|(_, value)| value.start).filter(|_| is_kept)
        }
        _ => None,
    }
}

fn belongs(message: &Message, index: u32) -> bool {
    index_at(message).and_then(|at| word(&message.1, at)) == Some(index)
}

/// Returns the message for another card.
fn moved(message: &Message, from: u32, to: u32) -> Message {
    let mut moved = message.clone();
    if let Some(at) = index_at(message).filter(|_| belongs(message, from)) {
        moved.1[at..at + 4].copy_from_slice(&to.to_ne_bytes());
    }
    moved
}

/// Returns true if there is a default route by an interface.
fn leads_out(all: &[Message], index: u32) -> bool {
    let is_default =
        |(kind, payload): &Message| *kind == RTM_NEWROUTE && payload.get(ROUTE_BITS_AT) == Some(&0);
    all.iter().any(|message| is_default(message) && belongs(message, index))
}

/// Returns true for an address that other machines may know. Each IPv6 card that is up has one of its link's.
fn is_global_address((kind, payload): &Message) -> bool {
    const RT_SCOPE_LINK: u8 = 253;
    *kind == RTM_NEWADDR && payload.get(SCOPE_AT).is_some_and(|scope| *scope < RT_SCOPE_LINK)
}

/// Puts routes to neighbours before routes by gateways, which the kernel refuses while it cannot reach them.
fn by_way(mut routes: Vec<Message>) -> Vec<Message> {
    let by_gateway = |(_, payload): &Message| {
        attributes(payload, ROUTE).iter().any(|(kind, _)| matches!(*kind, RTA_GATEWAY | RTA_VIA))
    };
    routes.sort_by_key(by_gateway);
    routes
}

/// A socket of rtnetlink(7).
struct Netlink(File);

impl Netlink {
    fn open() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: makes a descriptor, which has no other owner.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, and has no other owner.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    fn send(&mut self, kind: u16, flags: u16, payload: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::new();
        bytes.extend(((HEADER + payload.len()) as u32).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        // A number, and the sender's.
        bytes.extend([0; 8]);
        bytes.extend(payload);
        self.0.write_all(&bytes)
    }

    fn receive(&mut self) -> io::Result<Vec<Message>> {
        let mut bytes = vec![0; 64 << 10];
        let length = self.0.read(&mut bytes)?;
        Ok(messages(&bytes[..length]))
    }

    /// Lists everything of a kind, whose structure is so long. The kernel logs a request that is longer.
    fn dump(&mut self, what: u16, length: usize) -> io::Result<Vec<Message>> {
        self.send(what, NLM_F_DUMP, &vec![0; length])?;
        let mut found = Vec::new();
        loop {
            for (kind, payload) in self.receive()? {
                match kind {
                    NLMSG_DONE => return Ok(found),
                    NLMSG_ERROR => {
                        return Err(error_of(&payload).unwrap_or(io::ErrorKind::InvalidData.into()));
                    }
                    _ => found.push((kind, payload)),
                }
            }
        }
    }

    /// Tells the kernel what it has said before.
    fn change(&mut self, (kind, payload): Message) -> io::Result<()> {
        // A link is there, and is changed in its attributes only.
        let flags = if kind == RTM_NEWLINK { 0 } else { NLM_F_CREATE | NLM_F_REPLACE };
        self.send(kind, NLM_F_ACK | flags, &payload)?;
        for (kind, payload) in self.receive()? {
            if kind == NLMSG_ERROR {
                return error_of(&payload).map_or(Ok(()), Err);
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Splits what the kernel has sent.
fn messages(mut bytes: &[u8]) -> Vec<Message> {
    let mut found = Vec::new();
    while let Some(length) = word(bytes, 0).map(|length| length as usize) {
        let Some(payload) = bytes.get(HEADER..length) else { break };
        found.push((u16::from_ne_bytes([bytes[4], bytes[5]]), payload.to_vec()));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Returns the error in an answer; `None`: it is an acknowledgement.
fn error_of(payload: &[u8]) -> Option<io::Error> {
    let number = word(payload, 0).map_or(-libc::EPROTO, u32::cast_signed);
    (number != 0).then(|| io::Error::from_raw_os_error(-number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn route(protocol: u8, flags: u32, attributes: &[(u16, u32)]) -> Message {
        let mut payload = vec![0; ROUTE];
        payload[PROTOCOL_AT] = protocol;
        payload[ROUTE_FLAGS_AT..].copy_from_slice(&flags.to_ne_bytes());
        for (kind, value) in attributes {
            payload.extend(8_u16.to_ne_bytes());
            payload.extend(kind.to_ne_bytes());
            payload.extend(value.to_ne_bytes());
        }
        (RTM_NEWROUTE, payload)
    }

    #[test]
    fn routes_are_found_by_their_card() {
        let by_hand = route(4, 0, &[(RTA_GATEWAY, 9), (RTA_OIF, 7)]);
        assert!(belongs(&by_hand, 7) && !belongs(&by_hand, 9));
        assert!(belongs(&moved(&by_hand, 7, 3), 3));
        assert_eq!(moved(&by_hand, 8, 3), by_hand, "another card's");
        assert!(!belongs(&route(RTPROT_KERNEL, 0, &[(RTA_OIF, 7)]), 7), "it comes with the address");
        assert!(!belongs(&route(4, RTM_F_CLONED, &[(RTA_OIF, 7)]), 7));
        let mut torn = by_hand.clone();
        torn.1.truncate(torn.1.len() - 1);
        assert!(!belongs(&torn, 7));
    }

    #[test]
    fn the_kernel_lists_cards_and_no_other_interface() {
        let mut payload = vec![0; LINK];
        (payload[2], payload[4], payload[LINK_FLAGS_AT]) = (1, 7, 1);
        let add = |payload: &mut Vec<u8>, kind: u16, value: &[u8]| {
            payload.extend((value.len() as u16 + 4).to_ne_bytes());
            payload.extend(kind.to_ne_bytes());
            payload.extend(value);
            payload.resize(payload.len().next_multiple_of(4), 0);
        };
        add(&mut payload, IFLA_IFNAME, b"eth0\0");
        add(&mut payload, IFLA_ADDRESS, &[2, 0, 0, 0, 0, 9]);
        add(&mut payload, IFLA_PARENT_DEV_NAME, b"0000:00:05.0\0");
        let card = link_of(RTM_NEWLINK, &payload).expect("a card");
        assert_eq!((card.name.as_str(), card.index, card.up, card.mac[5]), ("eth0", 7, true, 9));
        assert_eq!(card.place, "0000:00:05.0 0");
        assert_eq!(link_of(RTM_NEWADDR, &payload), None);
        let mut loopback = payload.clone();
        (loopback[2], loopback[3]) = (4, 3);
        assert_eq!(link_of(RTM_NEWLINK, &loopback), None);
        for cut in 0..payload.len() {
            let _ = link_of(RTM_NEWLINK, &payload[..cut]);
        }
        add(&mut payload, IFLA_LINKINFO, b"bridge");
        assert_eq!(link_of(RTM_NEWLINK, &payload), None);
        // On this host: the same cards as by the file system, if it shows its devices.
        let by_files = cards(&Sysroot::default());
        let by_messages = links().expect("the kernel tells");
        for card in by_files {
            let same = by_messages.iter().find(|one| one.index == card.index).expect("it");
            assert_eq!((&same.name, same.mac, same.up), (&card.name, card.mac, card.up));
        }
    }

    #[test]
    fn cards_come_back_at_their_places() {
        let card = |name: &str, index, place: &str, up| Card {
            name: name.into(),
            index,
            place: place.into(),
            up,
            ..Card::default()
        };
        let kept = |card: Card| Kept { card, mtu: 0, whole: None, messages: Vec::new(), leads_out: false };
        let paired = |metal: &[Card], now: &[Card]| -> Vec<(String, Option<i32>)> {
            let guest = [card("down", 2, "", false), card("a", 3, "", true), card("b", 4, "", true)];
            let configuration = Configuration(guest.map(kept).into());
            let pairs = configuration.pairs(now, metal);
            pairs
                .into_iter()
                .map(|(kept, card)| (kept.card.name.clone(), card.map(|card| card.index)))
                .collect()
        };
        let pair = |name: &str, index| (name.to_owned(), index);
        let now = [card("eth0", 7, "x", false), card("eth1", 8, "y", false)];
        // In a guest the places are new: cards come in their order.
        assert_eq!(paired(&[], &now), [pair("a", Some(7)), pair("b", Some(8)), pair("down", None)]);
        // On the machine's own hardware each has its place.
        let metal = [card("a", 1, "y", true), card("down", 1, "x", false)];
        assert_eq!(paired(&metal, &now), [pair("a", Some(8)), pair("b", None), pair("down", Some(7))]);
        // A card that is still there keeps its own.
        let now = [card("a", 3, "", true), card("eth1", 8, "y", false)];
        assert_eq!(paired(&[], &now), [pair("b", Some(8)), pair("down", None)]);
    }

    /// A guest has one card, and gets what its peers know the machine by.
    #[test]
    fn the_only_card_that_comes_gets_the_configuration_that_matters_most() {
        let address = |scope| (RTM_NEWADDR, vec![2, 24, 0, scope, 0, 0, 0, 0]);
        let kept = |name: &str, up, messages: &[Message], whole, leads_out| Kept {
            card: Card { name: name.into(), index: name.len() as i32, up, ..Card::default() },
            mtu: 0,
            whole,
            messages: messages.to_vec(),
            leads_out,
        };
        let (of_link, global) = ([address(253)], [address(0)]);
        let down = kept("a", false, &global, None, true);
        let bare = kept("bb", true, &of_link, None, false);
        let private = kept("ccc", true, &global, None, false);
        let in_bridge = kept("dddd", true, &[], Some(9), false);
        let main = kept("eeeee", true, &[], Some(9), true);
        let came = [Card { name: "eth0".into(), index: 77, ..Card::default() }];
        let chosen = |all: &[&Kept]| {
            let configuration = Configuration(all.iter().copied().cloned().collect());
            let pairs = configuration.pairs(&came, &[]);
            let with_card = pairs.iter().filter(|(_, card)| card.is_some());
            let names: Vec<_> = with_card.map(|(kept, _)| kept.card.name.clone()).collect();
            assert_eq!(names.len(), 1);
            names[0].clone()
        };
        assert_eq!(
            chosen(&[&down, &bare, &private, &in_bridge, &main]),
            "eeeee",
            "the way to other networks"
        );
        assert_eq!(chosen(&[&down, &bare, &private, &in_bridge]), "ccc", "the first of those in use");
        assert_eq!(chosen(&[&down, &bare, &in_bridge]), "dddd");
        assert_eq!(chosen(&[&down, &bare]), "bb");
        assert_eq!(chosen(&[&down]), "a");
    }

    #[test]
    fn a_default_route_leads_out_and_no_other() {
        let default = route(4, 0, &[(RTA_GATEWAY, 9), (RTA_OIF, 7)]);
        let mut network = default.clone();
        network.1[ROUTE_BITS_AT] = 24;
        assert!(leads_out(&[network.clone(), default], 7));
        assert!(!leads_out(std::slice::from_ref(&network), 7));
        assert!(!leads_out(&[route(4, 0, &[(RTA_OIF, 8)]), (RTM_NEWROUTE, vec![])], 7));
    }

    #[test]
    fn routes_by_gateways_come_last() {
        let (near, far) = (route(4, 0, &[(RTA_OIF, 7)]), route(4, 0, &[(RTA_GATEWAY, 9), (RTA_OIF, 7)]));
        assert_eq!(by_way(vec![far.clone(), near.clone()]), [near, far]);
    }

    #[test]
    fn only_named_neighbours_are_kept() {
        let neighbour = |state: u16| {
            let mut payload = vec![0; 12];
            payload[4..8].copy_from_slice(&7_u32.to_ne_bytes());
            payload[STATE_AT..STATE_AT + 2].copy_from_slice(&state.to_ne_bytes());
            (RTM_NEWNEIGH, payload)
        };
        assert!(belongs(&neighbour(NUD_PERMANENT), 7) && !belongs(&neighbour(2), 7));
    }

    #[test]
    fn what_the_kernel_sends_is_split() {
        let mut bytes = Vec::new();
        for (length, kind) in [(17_u32, 3_u16), (16, 4), (u32::MAX, 5)] {
            bytes.extend(length.to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.resize(bytes.len() + (length as usize & 1) * 4, 9);
        }
        bytes.truncate(20 + 16 + 16);
        assert_eq!(messages(&bytes), [(3, vec![9]), (4, vec![])]);
        assert_eq!(error_of(&(-1_i32).to_ne_bytes()).expect("an error").raw_os_error(), Some(1));
        assert!(error_of(&[0; 4]).is_none());
    }

    /// The way of a card that goes and of another that comes, with the kernel's own answers, in a network
    /// namespace of the test's.
    #[test]
    fn another_card_gets_the_configuration() {
        let run = std::thread::spawn(|| {
            // SAFETY: this thread ends with the test.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return eprintln!("not tried: no network namespace");
            }
            let ip = |line: &str| {
                let output = Command::new("ip").args(line.split(' ')).output();
                output.is_ok_and(|output| output.status.success())
            };
            let listed = |line: &str| {
                let output = Command::new("ip").args(line.split(' ')).output().expect("ip");
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            if !ip("link add old type veth peer name other") {
                return eprintln!("not tried: no ip, or no veth");
            }
            for line in [
                "link set old up mtu 1400",
                "link set other up",
                "address add 10.9.0.2/24 dev old",
                "address add fd00::2/64 dev old nodad",
                "route add 10.8.0.0/16 via 10.9.0.9",
                "route add default via 10.9.0.1 metric 5",
                "route add 10.7.0.0/16 dev old table 77",
                "neighbour add 10.9.0.1 lladdr 52:54:00:09:00:01 dev old",
            ] {
                assert!(ip(line), "{line}");
            }
            let index = |name: &str| -> i32 {
                listed(&format!("-o link show {name}"))
                    .split(':')
                    .next()
                    .expect("it")
                    .parse()
                    .expect("a number")
            };
            let card =
                |name: &str| Card { name: name.into(), index: index(name), up: true, ..Card::default() };
            let mut netlink = Netlink::open().expect("a socket");
            let mut all = netlink.dump(RTM_GETADDR, ADDRESS).expect("addresses");
            all.extend(by_way(netlink.dump(RTM_GETROUTE, ROUTE).expect("routes")));
            all.extend(netlink.dump(RTM_GETNEIGH, NEIGHBOUR).expect("neighbours"));
            let old = card("old");
            all.retain(|message| belongs(message, old.index.cast_unsigned()));
            let kept = Kept { card: old, mtu: 1400, whole: None, messages: all, leads_out: false };
            let shown = || {
                let state = ["-4 address show old", "route show", "route show table 77", "neighbour show"];
                state.map(|line| {
                    listed(line).split_once(':').map_or_else(|| listed(line), |(_, rest)| rest.into())
                })
            };
            let before = shown();
            assert!(ip("link delete old") && ip("link add new type veth peer name other"));
            assert!(ip("link set other up"));
            assert_eq!(kept.move_to(&card("new")), Vec::<String>::new());
            assert_eq!(shown(), before);
            assert!(listed("-6 address show old").contains("fd00::2/64"));
        });
        run.join().expect("the test's thread");
    }
}
