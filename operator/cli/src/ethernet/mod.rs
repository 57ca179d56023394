//! Network cards, in the kernel's own terms: what they are, giving them an address, and frames to all of an Ethernet
//! ([`packets`]).

pub mod made;
pub mod packets;

use crate::sysroot::Sysroot;
use serde::{Deserialize, Serialize};
use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    thread,
    time::{Duration, Instant},
};

/// How long a card may take to be there.
const PATIENCE: Duration = Duration::from_secs(30);

/// `ARPHRD_ETHER`, as `/sys/class/net/CARD/type` says it.
const ETHERNET: &str = "1";

/// A card's own address.
pub type Mac = [u8; 6];

/// A card, and how it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Its address.
    pub mac: Mac,
    /// The PCI device that it is, and which of its ports: the same in every system on this machine, and on an equal one.
    pub place: String,
    /// The kernel's number of it.
    pub index: i32,
    /// It is up.
    pub up: bool,
    /// Its IPv4 addresses, each with the length of its prefix.
    pub addresses: Vec<(Ipv4Addr, u8)>,
    /// Where packets go that are for nobody on this network, if they go out here.
    pub gateway: Option<Ipv4Addr>,
}

impl Card {
    /// How near an address is by it: 2 on its own network, 1 behind its gateway, 0 nowhere.
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

/// All Ethernet cards that are real devices.
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

/// Whatever has addresses on an Ethernet: a card, or what is made of some (a bridge, a bond, a VLAN).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number of it.
    pub index: i32,
    /// Its own address.
    pub mac: Mac,
    /// Its IP addresses.
    pub addresses: Vec<IpAddr>,
}

/// All of them that are up.
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

/// Virtio's devices are numbered as drivers come; the PCI device is behind them.
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

/// The default route by a card, of `/proc/net/route`: numbers there are in the order of this machine's bytes.
fn gateway(routes: &str, name: &str) -> Option<Ipv4Addr> {
    let default = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_default = words.first() == Some(&name) && words.get(1) == Some(&"00000000");
        let gateway = u32::from_str_radix(words.get(2)?, 16).ok()?;
        (is_default && gateway != 0).then(|| Ipv4Addr::from(gateway.to_ne_bytes()))
    };
    routes.lines().skip(1).find_map(default)
}

/// IPv4 addresses in use: card, address, length of the prefix.
fn addresses() -> Vec<(String, Ipv4Addr, u8)> {
    let v4 = |(name, address, prefix)| match address {
        IpAddr::V4(address) => Some((name, address, prefix)),
        IpAddr::V6(_) => None,
    };
    all_addresses().into_iter().filter_map(v4).collect()
}

/// IP addresses in use: card, address, length of the prefix.
fn all_addresses() -> Vec<(String, IpAddr, u8)> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the kernel's answer is put where `first` is, and freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: a list that libc has made, and that lives until it is freed; the last one's successor is null.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if let (Some(address), Some(mask)) = (ip(entry.ifa_addr), ip(entry.ifa_netmask)) {
            // SAFETY: a name that ends with a NUL, of the same list.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            found.push((name.to_string_lossy().into_owned(), address, ones(mask)));
        }
    }
    // SAFETY: what `getifaddrs` has made; nothing of it is kept.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// How long a prefix of this mask is.
fn ones(mask: IpAddr) -> u8 {
    // At most 128.
    (match mask {
        IpAddr::V4(mask) => u32::from(mask).count_ones(),
        IpAddr::V6(mask) => u128::from(mask).count_ones(),
    }) as u8
}

fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: null, or the address of one of libc's list, which begins with its family.
    let family = unsafe { address.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: what is of this family is of this type; it need not be aligned like one.
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
    // Behind the port, in the order of the network.
    for (to, from) in raw.sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    raw
}

/// A socket to ask about cards with.
fn control() -> io::Result<OwnedFd> {
    // SAFETY: makes a descriptor, which nobody else has.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, and is owned by this alone.
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
    // SAFETY: these requests read and write one `ifreq`, which this is.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), number as _, std::ptr::from_mut(request)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a card its addresses, and brings it up.
///
/// # Errors
/// If the kernel refuses.
pub fn configure(name: &str, addresses: &[(Ipv4Addr, u8)]) -> io::Result<()> {
    for (number, (address, prefix)) in addresses.iter().enumerate() {
        // One of each label.
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
/// If the kernel refuses.
pub fn bring_up(name: &str) -> io::Result<()> {
    let mut one = request(name)?;
    ask(libc::SIOCGIFFLAGS, &mut one)?;
    // SAFETY: the kernel has just put the flags there.
    let flags = unsafe { one.ifr_ifru.ifru_flags };
    one.ifr_ifru.ifru_flags = flags | libc::IFF_UP as i16 | libc::IFF_RUNNING as i16;
    ask(libc::SIOCSIFFLAGS, &mut one)
}

/// Sets the network up as it was when `was` was described, and returns the card's name, which may be another one.
///
/// # Errors
/// If the card does not appear, or the kernel refuses.
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
    // One that was set up before is there.
    if let Some(Err(error)) = was.gateway.map(route_by)
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        eprintln!("mercury: only this network can be reached: {error}");
    }
    Ok(name)
}

/// Sends what is for nobody on this network to `gateway`.
///
/// # Errors
/// If the kernel refuses.
pub fn route_by(gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: all zeros are a valid route.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    let control = control()?;
    // SAFETY: this request reads one `rtentry`, which this is.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCADDRT as _, &raw mut route) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Tells a card which address it has. The kernel may know it by that already, and the card by another.
///
/// # Errors
/// If the kernel or the card refuses.
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

/// The card that packets to an address go out by, as far as that can be told by its own addresses.
#[must_use]
pub fn card_for(cards: &[Card], local: Ipv4Addr) -> Option<&Card> {
    cards.iter().find(|card| card.addresses.iter().any(|(address, _)| *address == local))
}

/// The address that this machine has on the way to somewhere.
///
/// # Errors
/// If there is no way.
pub fn local_address(to: SocketAddrV4) -> io::Result<Ipv4Addr> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // Nothing is sent.
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
        let table = "Iface\tDestination\tGateway\tFlags\nens3\t0000090A\t00000000\t0001\nens3\t00000000\t0100090A\t0003\n";
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
