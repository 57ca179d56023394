//! Network cards, by the kernel's interfaces: their properties, setting their addresses, and
//! broadcast frames ([`packets`]).

pub mod made;
pub mod packets;
pub mod takeover;

use mercury_control::sysroot::Sysroot;
use serde::{Deserialize, Serialize};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

/// Time for a card to appear.
const PATIENCE: Duration = Duration::from_secs(30);

/// `ARPHRD_ETHER`, as `/sys/class/net/CARD/type` shows it.
const ETHERNET: &str = "1";

/// The MAC address of a card.
pub type Mac = [u8; 6];

/// A card and its configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    pub name: String,
    pub mac: Mac,
    /// PCI device and port of the card: the same in every system on this machine, and on an equal
    /// one.
    pub place: String,
    /// Index of the card in the kernel.
    pub index: i32,
    /// True if the card is up.
    pub up: bool,
    /// IPv4 addresses, each with the length of its prefix.
    pub addresses: Vec<(Ipv4Addr, u8)>,
    /// Default gateway, if it is reached by this card.
    pub gateway: Option<Ipv4Addr>,
}

impl Card {
    /// Returns the distance of an address by this card: 2 on its own network, 1 behind its gateway,
    /// 0 if unreachable.
    #[must_use]
    pub fn nearness(&self, to: Ipv4Addr) -> u8 {
        let network = |address: Ipv4Addr, prefix: u8| {
            u32::from(address) & u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0)
        };
        let is_on = |(own, prefix): &(Ipv4Addr, u8)| network(*own, *prefix) == network(to, *prefix);
        match (self.addresses.iter().any(is_on), self.gateway) {
            (true, _) => 2,
            (false, Some(_)) => 1,
            (false, None) => 0,
        }
    }
}

/// Lists all Ethernet cards that are real devices.
#[must_use]
pub fn cards(sysroot: &Sysroot) -> Vec<Card> {
    let routes = sysroot.text("proc/net/route").unwrap_or_default();
    let all = addresses();
    let card = |name: &String| {
        let text = |file: &str| sysroot.text(&format!("sys/class/net/{name}/{file}"));
        let is_real = sysroot.exists(&format!("sys/class/net/{name}/device"));
        if !is_real || text("type").as_deref() != Some(ETHERNET) {
            return None;
        }
        let flags = u32::from_str_radix(text("flags")?.trim_start_matches("0x"), 16).ok()?;
        Some(Card {
            name: name.clone(),
            mac: parse_mac(&text("address")?)?,
            place: place(name, &text("dev_port").unwrap_or_default(), sysroot),
            index: text("ifindex")?.parse().ok()?,
            up: flags & libc::IFF_UP as u32 != 0,
            addresses: all
                .iter()
                .filter(|(label, ..)| label.split(':').next() == Some(name))
                .map(|(_, address, prefix)| (*address, *prefix))
                .collect(),
            gateway: gateway(&routes, name),
        })
    };
    sysroot.names("sys/class/net").iter().filter_map(card).collect()
}

/// An interface with addresses on an Ethernet: a card, or a device made of some (a bridge, a bond,
/// a VLAN).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Index of the interface in the kernel.
    pub index: i32,
    /// MAC address.
    pub mac: Mac,
    pub addresses: Vec<IpAddr>,
}

/// Lists all interfaces that are up.
#[must_use]
pub fn interfaces(sysroot: &Sysroot) -> Vec<Interface> {
    let all = all_addresses();
    let interface = |name: &String| {
        let text = |file: &str| sysroot.text(&format!("sys/class/net/{name}/{file}"));
        let flags = u32::from_str_radix(text("flags")?.trim_start_matches("0x"), 16).ok()?;
        let of_it = all.iter().filter(|(label, ..)| label.split(':').next() == Some(name));
        let addresses: Vec<_> = of_it.map(|(_, address, _)| *address).collect();
        let speaks = flags & libc::IFF_UP as u32 != 0 && !addresses.is_empty();
        (speaks && text("type").as_deref() == Some(ETHERNET)).then_some(())?;
        Some(Interface {
            index: text("ifindex")?.parse().ok()?,
            mac: parse_mac(&text("address")?)?,
            addresses,
        })
    };
    sysroot.names("sys/class/net").iter().filter_map(interface).collect()
}

/// Returns the place of a card. Virtio's devices are numbered in the order of probing, so the PCI
/// device above them counts.
fn place(name: &str, port: &str, sysroot: &Sysroot) -> String {
    let device = std::fs::canonicalize(sysroot.path(&format!("sys/class/net/{name}/device")));
    let device = device.unwrap_or_default();
    let is_pci = |part: &&str| part.len() > 10 && part.contains('.') && part.matches(':').count() == 2;
    let mut parts = device.iter().filter_map(|part| part.to_str());
    format!("{} {port}", parts.rfind(is_pci).unwrap_or_default())
}

fn parse_mac(text: &str) -> Option<Mac> {
    let bytes: Vec<u8> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>().ok()?;
    bytes.try_into().ok()
}

/// Returns the default gateway by a card, from `/proc/net/route`, which has numbers in this
/// machine's byte order.
fn gateway(routes: &str, name: &str) -> Option<Ipv4Addr> {
    let default = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_default = words.first() == Some(&name) && words.get(1) == Some(&"00000000");
        let gateway = u32::from_str_radix(words.get(2)?, 16).ok()?;
        (is_default && gateway != 0).then(|| Ipv4Addr::from(gateway.to_ne_bytes()))
    };
    routes.lines().skip(1).find_map(default)
}

/// Lists the IPv4 addresses in use: card, address, length of the prefix.
fn addresses() -> Vec<(String, Ipv4Addr, u8)> {
    let v4 = |(name, address, prefix)| match address {
        IpAddr::V4(address) => Some((name, address, prefix)),
        IpAddr::V6(_) => None,
    };
    all_addresses().into_iter().filter_map(v4).collect()
}

/// Lists the IP addresses in use: card, address, length of the prefix.
fn all_addresses() -> Vec<(String, IpAddr, u8)> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the kernel's answer is put where `first` is, and freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: a list that libc has made, and that lives until it is freed; the last one's successor
    // is null.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if let (Some(address), Some(mask)) = (ip(entry.ifa_addr), ip(entry.ifa_netmask)) {
            // SAFETY: a name that ends with a NUL, of the same list.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            found.push((name.to_string_lossy().into_owned(), address, ones(mask)));
        }
    }
    // SAFETY: the list that `getifaddrs` has made; no reference to it is kept.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// Returns the length of a prefix with this mask.
fn ones(mask: IpAddr) -> u8 {
    // At most 128.
    (match mask {
        IpAddr::V4(mask) => u32::from(mask).count_ones(),
        IpAddr::V6(mask) => u128::from(mask).count_ones(),
    }) as u8
}

fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: null, or the address of an entry of libc's list, which begins with its family.
    let family = unsafe { address.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: an address of this family is of this type; an unaligned read needs no
            // alignment.
            let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: likewise.
            let address = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: all zeros are a valid address.
    let mut raw: libc::sockaddr = unsafe { std::mem::zeroed() };
    raw.sa_family = libc::AF_INET as libc::sa_family_t;
    // After the port, in network byte order.
    for (to, from) in raw.sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    raw
}

/// Opens a socket for requests about cards.
fn control() -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, which has no other owner.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: all zeros are a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

fn ask(number: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    let control = control()?;
    // SAFETY: these requests read and write one `ifreq`, and `request` is one.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), number as _, std::ptr::from_mut(request)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a card its addresses, and brings it up.
///
/// # Errors
///
/// Returns an error if the kernel refuses.
pub fn configure(name: &str, addresses: &[(Ipv4Addr, u8)]) -> io::Result<()> {
    for (number, (address, prefix)) in addresses.iter().enumerate() {
        // Each address needs a label of its own.
        let label = if number == 0 { name.to_owned() } else { format!("{name}:{number}") };
        add_address(&label, *address, *prefix)?;
    }
    bring_up(name)
}

fn add_address(label: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let mut one = request(label)?;
    one.ifr_ifru.ifru_addr = socket_address(address);
    ask(libc::SIOCSIFADDR, &mut one)?;
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
    one.ifr_ifru.ifru_netmask = socket_address(Ipv4Addr::from(mask));
    ask(libc::SIOCSIFNETMASK, &mut one)
}

/// Brings a card up.
///
/// # Errors
///
/// Returns an error if the kernel refuses.
pub fn bring_up(name: &str) -> io::Result<()> {
    let mut one = request(name)?;
    ask(libc::SIOCGIFFLAGS, &mut one)?;
    // SAFETY: the kernel has just put the flags there.
    let flags = unsafe { one.ifr_ifru.ifru_flags };
    one.ifr_ifru.ifru_flags = flags | libc::IFF_UP as i16 | libc::IFF_RUNNING as i16;
    ask(libc::SIOCSIFFLAGS, &mut one)
}

/// Sets the network up as `was` describes it, and returns the card's name, which may have changed.
///
/// # Errors
///
/// Returns an error if the card does not appear, or the kernel refuses.
pub fn set_up(was: &Card) -> io::Result<String> {
    let end = Instant::now() + PATIENCE;
    let name = loop {
        if let Some(card) = cards(&Sysroot::default()).into_iter().find(|card| card.mac == was.mac) {
            break card.name;
        }
        if Instant::now() > end {
            return Err(io::Error::other(format!("the card that was {} is not there", was.name)));
        }
        thread::sleep(Duration::from_millis(50));
    };
    bring_up("lo")?;
    configure(&name, &was.addresses)?;
    // An earlier call may have set the route.
    if let Some(Err(error)) = was.gateway.map(route_by)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        eprintln!("mercury: only this network can be reached: {error}");
    }
    Ok(name)
}

/// Sets `gateway` as the default route.
///
/// # Errors
///
/// Returns an error if the kernel refuses.
pub fn route_by(gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: all zeros are a valid route.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    let control = control()?;
    // SAFETY: this request reads one `rtentry`, and `route` is one.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCADDRT as _, &raw mut route) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sets the MAC address of a card. The kernel may have this address for the card already, and the
/// card another one.
///
/// # Errors
///
/// Returns an error if the kernel or the card refuses.
pub fn set_mac(name: &str, mac: Mac) -> io::Result<()> {
    let mut one = request(name)?;
    // SAFETY: all zeros are a valid address.
    let mut raw: libc::sockaddr = unsafe { std::mem::zeroed() };
    raw.sa_family = libc::ARPHRD_ETHER;
    for (to, from) in raw.sa_data.iter_mut().zip(mac) {
        *to = from as libc::c_char;
    }
    one.ifr_ifru.ifru_hwaddr = raw;
    ask(libc::SIOCSIFHWADDR, &mut one)
}

/// Returns the card with this local address, by which packets go out.
#[must_use]
pub fn card_for(cards: &[Card], local: Ipv4Addr) -> Option<&Card> {
    cards.iter().find(|card| card.addresses.iter().any(|(address, _)| *address == local))
}

/// Returns this machine's address on the way to a peer.
///
/// # Errors
///
/// Returns an error if there is no route.
pub fn local_address(to: SocketAddrV4) -> io::Result<Ipv4Addr> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // A datagram socket sends nothing here.
    socket.connect(to)?;
    match socket.local_addr()?.ip() {
        std::net::IpAddr::V4(address) => Ok(address),
        std::net::IpAddr::V6(_) => Err(io::ErrorKind::AddrNotAvailable.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways() {
        let table = "Iface\tDestination\tGateway\tFlags\n\
                     ens3\t0000090A\t00000000\t0001\n\
                     ens3\t00000000\t0100090A\t0003\n";
        assert_eq!(gateway(table, "ens3"), Some(Ipv4Addr::new(10, 9, 0, 1)));
        assert_eq!(gateway(table, "ens4"), None);
    }

    #[test]
    fn addresses_of_cards() {
        assert_eq!(parse_mac("52:54:00:09:00:01"), Some([0x52, 0x54, 0, 9, 0, 1]));
        assert_eq!(parse_mac("52:54:00:09:00"), None);
        let raw = socket_address(Ipv4Addr::new(10, 9, 0, 200));
        assert_eq!(ip(&raw const raw), Some(Ipv4Addr::new(10, 9, 0, 200).into()));
        assert_eq!(ones("ffff:ffff:ffff:ffff::".parse().expect("a mask")), 64);
    }

    #[test]
    fn places_are_those_of_pci() {
        let folder = tempfile::tempdir().expect("a folder");
        let device = folder.path().join("sys/devices/pci0000:00/0000:00:05.0/virtio3");
        let class = folder.path().join("sys/class/net/eth0");
        for path in [&device, &class] {
            std::fs::create_dir_all(path).expect("a folder");
        }
        std::os::unix::fs::symlink(&device, class.join("device")).expect("a link");
        let sysroot = Sysroot::at(folder.path());
        assert_eq!(place("eth0", "1", &sysroot), "0000:00:05.0 1");
        assert_eq!(place("eth1", "0", &sysroot), " 0");
    }

    #[test]
    fn the_loopback_is_found() {
        assert!(addresses().iter().any(|(_, address, prefix)| address.is_loopback() && *prefix == 8));
    }
}
