//! Options of network cards: the uplink or subnet, the card's address, and ports that lead to the guest.

use std::{fmt, str::FromStr};

/// The size of an interface's name with the zero byte at its end (`linux/if.h`).
const IFNAMSIZ: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let wrong = || "an Ethernet address is six bytes like 52:54:00:12:34:56".to_owned();
        let bytes = text.split(':').map(|byte| match byte.len() {
            1..=2 => u8::from_str_radix(byte, 16).ok(),
            _ => None,
        });
        let bytes: Option<Vec<u8>> = bytes.collect();
        let mac: [u8; 6] = bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(wrong)?;
        match mac {
            [0, 0, 0, 0, 0, 0] => Err("this is no card's address".to_owned()),
            [first, ..] if first & 1 != 0 => Err("this is the address of a group, not of a card".to_owned()),
            mac => Ok(Self(mac)),
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Mac {
    /// One that is always the same for a name on a host, and hardly ever another card's: locally
    /// administered, with a hash (FNV-1a) of both.
    #[must_use]
    pub fn of(host: &str, name: &str) -> Self {
        let bytes = host.trim().bytes().chain([0]).chain(name.bytes());
        let hash = bytes.fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        let [a, b, c, d, e, ..] = hash.to_le_bytes();
        Self([2, a, b, c, d, e])
    }
}

/// The other end of a network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Uplink {
    /// A `passt` of its own: the host's network without privileges.
    Passt {
        /// True if the guest reaches the host's own addresses (127.0.0.1) at the gateway's.
        reaches_host: bool,
    },
    /// A tap interface that is there.
    Tap(String),
}

impl FromStr for Uplink {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match (text, text.strip_prefix("tap=")) {
            ("passt", _) => Ok(Self::Passt { reaches_host: false }),
            ("passt,host", _) => Ok(Self::Passt { reaches_host: true }),
            (_, Some(name)) if is_name(name) => Ok(Self::Tap(name.to_owned())),
            (_, Some(_)) => Err("an interface's name has 1 to 15 characters, without `/`".to_owned()),
            _ => Err("there are passt, `passt,host` and tap=NAME".to_owned()),
        }
    }
}

/// The name of a subnet: a network between machines of one user.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SubnetName(String);

impl FromStr for SubnetName {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        const LONGEST: usize = 32;
        let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
        if (1..=LONGEST).contains(&text.len()) && text.chars().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        Err("a subnet's name has 1 to 32 letters, digits, `-` and `_`".to_owned())
    }
}

impl fmt::Display for SubnetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The network that a card of a hosted machine is on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Network {
    Uplink(Uplink),
    Subnet(SubnetName),
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.strip_prefix("subnet=") {
            Some(name) => name.parse().map(Self::Subnet),
            None => match text.parse() {
                Ok(uplink) => Ok(Self::Uplink(uplink)),
                Err(why) if text.starts_with("tap") => Err(why),
                Err(_) => Err("there are passt, `passt,host`, tap=NAME and subnet=NAME".to_owned()),
            },
        }
    }
}

fn is_name(name: &str) -> bool {
    (1..IFNAMSIZ).contains(&name.len())
        && !matches!(name, "." | "..")
        && !name.contains(|c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace() || c == '\0')
}

/// A port of the host's that passt forwards to the guest, in its own words (`passt(1)`, `-t` and `-u`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    is_udp: bool,
    ports: String,
}

impl FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let udp = text.strip_prefix("udp:");
        let ports = udp.or_else(|| text.strip_prefix("tcp:")).unwrap_or(text);
        if !ports.contains(|c: char| c.is_ascii_digit()) {
            return Err("ports are like 8080, 8080:80 and udp:127.0.0.1/5353:53".to_owned());
        }
        Ok(Self { is_udp: udp.is_some(), ports: ports.to_owned() })
    }
}

impl Forward {
    /// Returns true for a port of UDP, false for one of TCP.
    #[must_use]
    pub fn is_udp(&self) -> bool {
        self.is_udp
    }

    /// Returns the ports in passt's words.
    #[must_use]
    pub fn ports(&self) -> &str {
        &self.ports
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_groups_are_none() {
        let mac: Mac = "52:54:0:12:34:aB".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:12:34:ab");
        for wrong in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52:54:00:12:34:1ab",
            "01:00:5e:00:00:01",
            "0:0:0:0:0:0",
        ] {
            assert!(wrong.parse::<Mac>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_default_address_is_a_card_s_and_depends_on_host_and_name() {
        let [one, same, other, elsewhere] = [("a\n", "tap0"), ("a", "tap0"), ("a", "tap1"), ("b", "tap0")]
            .map(|(host, name)| Mac::of(host, name));
        assert!(one == same && one != other && one != elsewhere);
        assert_eq!(one.0[0], 2);
    }

    #[test]
    fn networks_are_uplinks_and_subnets_with_plain_names() {
        let subnet = |name: &str| Ok(Network::Subnet(SubnetName(name.to_owned())));
        assert_eq!("subnet=web-1_a".parse(), subnet("web-1_a"));
        assert_eq!("subnet=passt".parse(), subnet("passt"));
        assert_eq!("tap=tap0".parse(), Ok(Network::Uplink(Uplink::Tap("tap0".to_owned()))));
        let names = ["", ".", "a.b", "a/b", "ä", "a b", "a,b", &"x".repeat(33)];
        for wrong in
            names.map(|name| format!("subnet={name}")).iter().map(String::as_str).chain(["subnet", ""])
        {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
        assert!("bridge".parse::<Network>().is_err_and(|why| why.contains("subnet=NAME")));
    }

    #[test]
    fn uplinks_and_ports_are_read() {
        assert_eq!("passt".parse(), Ok(Uplink::Passt { reaches_host: false }));
        assert_eq!("passt,host".parse(), Ok(Uplink::Passt { reaches_host: true }));
        assert_eq!("tap=tap0".parse(), Ok(Uplink::Tap("tap0".to_owned())));
        for wrong in ["", "tap", "tap=", "tap=a/b", "tap=sixteen-letters0", "tap=..", "passt,all", "bridge"] {
            assert!(wrong.parse::<Uplink>().is_err(), "{wrong}");
        }
        let ports = |text: &str| text.parse::<Forward>().map(|one| (one.is_udp, one.ports));
        assert_eq!(ports("8080:80"), Ok((false, "8080:80".to_owned())));
        assert_eq!(ports("tcp:8080"), Ok((false, "8080".to_owned())));
        assert_eq!(ports("udp:127.0.0.1/53"), Ok((true, "127.0.0.1/53".to_owned())));
        assert!(ports("udp:").is_err() && ports("all").is_err());
    }
}
