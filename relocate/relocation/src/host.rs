//! The argument HOST: a name or an address, with or without a port. Moves go by IPv4, because the
//! destination's restore environment sets up nothing else. An IPv6 address is parsed so that its
//! refusal can say the true reason.

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};

/// Port to listen at by default.
pub const PORT: u16 = 4747;

const IPV4_ALONE: &str = "moves go by IPv4 only: the destination's restore environment has no IPv6 address";

/// Returns the address of the destination.
///
/// # Errors
///
/// Returns an error if HOST is no address, or cannot be reached by IPv4.
pub fn resolve(host: &str) -> Result<SocketAddr> {
    let failed = |why: String| {
        Error::new(Exit::Failed, format!("{host}: {why}"))
            .hint("give HOST or HOST:PORT, with an IPv4 address")
    };
    if let Some(literal) = literal(host) {
        let (address, port) = literal.map_err(failed)?;
        let mapped = address.to_ipv4_mapped().ok_or_else(|| failed(IPV4_ALONE.into()))?;
        return Ok((mapped, port.unwrap_or(PORT)).into());
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let named = if has_port { host.to_owned() } else { format!("{host}:{PORT}") };
    let all: Vec<_> = named.to_socket_addrs().map_err(|error| failed(error.to_string()))?.collect();
    chosen(&all).map_err(failed)
}

/// Returns the first of a name's addresses that a move can go to.
fn chosen(all: &[SocketAddr]) -> std::result::Result<SocketAddr, String> {
    let v4 = all.iter().find(|to| to.is_ipv4()).copied();
    v4.ok_or_else(|| match all.iter().map(SocketAddr::ip).find(IpAddr::is_ipv6) {
        Some(other) => format!("the host has no IPv4 address, but {other}; {IPV4_ALONE}"),
        None => "the host has no address".into(),
    })
}

/// Parses an IPv6 address: in brackets if a port may follow, with a zone (`%eth0`) or without.
/// Returns `None` for other text.
pub fn literal(text: &str) -> Option<std::result::Result<(Ipv6Addr, Option<u16>), String>> {
    let (inside, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((inside, "")) => (inside, Ok(None)),
            Some((inside, behind)) => {
                let port = behind.strip_prefix(':').and_then(|port| port.parse().ok());
                (inside, port.map(Some).ok_or("the text after the bracket is no port"))
            }
            None => return Some(Err("the bracket is not closed".into())),
        },
        // A name, or an IPv4 address, has at most one colon: before its port.
        None if text.matches(':').count() > 1 => (text, Ok(None)),
        None => return None,
    };
    let (address, zone) =
        inside.split_once('%').map_or((inside, None), |(address, zone)| (address, Some(zone)));
    let found = match (address.parse::<Ipv6Addr>(), zone) {
        (Err(_), _) => Err(format!("{address} is no IPv6 address")),
        (Ok(_), Some("")) => Err("the zone after % is missing".into()),
        (Ok(address), Some(_)) if !address.is_unicast_link_local() => {
            Err(format!("only link-local addresses (fe80::) have a zone, and {address} is none"))
        }
        (Ok(address), None) if address.is_unicast_link_local() => {
            Err(format!("{address} is link-local, and has no meaning without its card: {address}%CARD"))
        }
        (Ok(address), _) => Ok(address),
    };
    Some(found.and_then(|address| Ok((address, port?))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(host: &str) -> std::result::Result<String, String> {
        resolve(host).map(|to| to.to_string()).map_err(|error| error.message)
    }

    #[test]
    fn hosts_may_have_ports() {
        assert_eq!(of("10.9.0.3").as_deref(), Ok("10.9.0.3:4747"));
        assert_eq!(of("10.9.0.3:99").as_deref(), Ok("10.9.0.3:99"));
        assert!(of("").is_err());
    }

    #[test]
    fn ipv6_is_understood_and_refused() {
        for host in [
            "::1",
            "[::1]",
            "[::1]:99",
            "2001:db8::3",
            "[2001:db8::3]:4747",
            "fe80::1%eth0",
            "[fe80::1%eth0]:99",
        ] {
            assert!(of(host).is_err_and(|why| why.contains("IPv4 only")), "{host}: {:?}", of(host));
        }
        // A mapped address counts as IPv4.
        assert_eq!(of("[::ffff:10.9.0.3]:99").as_deref(), Ok("10.9.0.3:99"));
        assert_eq!(of("::ffff:10.9.0.3").as_deref(), Ok("10.9.0.3:4747"));
    }

    #[test]
    fn an_invalid_address_is_refused_with_the_reason() {
        for (host, why) in [
            ("[::1", "not closed"),
            ("[::1]99", "no port"),
            ("[::1]:", "no port"),
            ("[::1]:65536", "no port"),
            ("[]", "no IPv6 address"),
            ("[10.9.0.3]:99", "no IPv6 address"),
            ("1:2:3", "no IPv6 address"),
            ("fe80::1", "link-local"),
            ("[fe80::1%]:99", "zone"),
            ("2001:db8::3%eth0", "only link-local"),
        ] {
            assert!(of(host).is_err_and(|said| said.contains(why)), "{host}: {:?}", of(host));
        }
    }

    #[test]
    fn a_name_needs_an_ipv4_address() {
        let (v4, v6) = (([10, 9, 0, 3], 99).into(), (Ipv6Addr::LOCALHOST, 99).into());
        assert_eq!(chosen(&[v6, v4]), Ok(v4));
        assert!(chosen(&[v6]).is_err_and(|why| why.contains("::1") && why.contains("IPv4 only")));
        assert!(chosen(&[]).is_err());
    }
}
