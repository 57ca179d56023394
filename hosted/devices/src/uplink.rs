//! The uplink of a network card: a `passt` of its own, or a tap interface of the host. All of it is
//! opened here, before the guest runs.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::OpenOptionsExt, net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
};

use mercury_hosted_options::net::{Forward, Mac, Uplink};

use crate::{
    error::{Error, Result},
    link::{Framing, Link},
    net::Net,
    signals::Waker,
};

/// The options of a network card.
#[derive(Clone, Debug)]
pub struct NetOption {
    pub uplink: Uplink,
    /// The card's address, unless the default will do.
    pub mac: Option<Mac>,
    /// Ports of the host's, for passt.
    pub forwards: Vec<Forward>,
}

/// An uplink that is open.
#[derive(Debug)]
pub struct Opened {
    descriptor: OwnedFd,
    framing: Framing,
    mac: Mac,
    mtu: u16,
}

impl NetOption {
    /// Opens it.
    ///
    /// # Errors
    /// If the interface is missing, or belongs to another user.
    pub fn open(&self) -> Result<Opened> {
        const MACHINE: &str = "/etc/machine-id";
        let host = std::fs::read_to_string(MACHINE).unwrap_or_default();
        let (name, (descriptor, mtu), framing) = match &self.uplink {
            Uplink::Passt { reaches_host } => {
                ("passt", passt(*reaches_host, &self.forwards)?, Framing::Stream)
            }
            Uplink::Tap(_) if !self.forwards.is_empty() => {
                return Err(Error::new("only passt forwards ports").hint("leave out --forward"));
            }
            Uplink::Tap(name) => (name.as_str(), tap(name)?, Framing::Packets),
        };
        let mac = self.mac.unwrap_or_else(|| Mac::of(&host, name));
        Ok(Opened { descriptor, framing, mac, mtu })
    }
}

impl Opened {
    /// Makes the card for it. From now on the waker is called when frames have come.
    ///
    /// # Errors
    /// If there can be no thread.
    pub fn start(self, waker: Waker) -> Result<Net> {
        Ok(Net::new(Link::start(self.descriptor, self.framing, waker)?, self.mac, self.mtu))
    }
}

/// Starts a passt, which is ready when the command is back, and ends with the connection.
fn passt(reaches_host: bool, forwards: &[Forward]) -> Result<(OwnedFd, u16)> {
    // What passt tells by DHCP if it is not told otherwise.
    const MTU: u16 = 65520;
    let wrong = |error: io::Error| Error::host(format!("cannot connect passt: {error}"));
    let (ours, its) = UnixStream::pair().map_err(wrong)?;
    ours.set_nonblocking(true).map_err(wrong)?;
    have_room(&its);
    have_room(&ours);
    let number = its.as_raw_fd();
    let mut command = Command::new("passt");
    command.arg("--fd").arg(number.to_string()).args(["--mtu", &MTU.to_string()]);
    if !reaches_host {
        command.arg("--no-map-gw");
    }
    for (option, is_udp) in [("--tcp-ports", false), ("--udp-ports", true)] {
        let ports: Vec<&str> =
            forwards.iter().filter(|one| one.is_udp() == is_udp).map(Forward::ports).collect();
        let ports = if ports.is_empty() { vec!["none"] } else { ports };
        ports.iter().for_each(|ports| {
            command.args([option, ports]);
        });
    }
    // SAFETY: Both are system calls that take numbers, which a new process may make.
    unsafe {
        command.pre_exec(move || {
            // The monitor may have switched off the randomness of addresses.
            libc::personality(0);
            match libc::fcntl(number, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
    let output = command.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::host("there is no passt").hint("Debian's package is called passt"),
        _ => Error::host(format!("cannot start passt: {error}")),
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // The last line is the reason.
        let why = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it does not say why");
        if why.contains("user namespace") {
            return Err(Error::host(format!("passt does not start: {why}")).hint(
                "the host allows no user namespaces (sysctl user.max_user_namespaces, \
                 or a container's rules), which only passt needs: --net tap=NAME does without",
            ));
        }
        return Err(Error::new(format!("passt does not start: {why}"))
            .hint("write the ports of --forward as in passt(1); those below 1024 need root"));
    }
    Ok((ours.into(), MTU))
}

/// Gives passt's end as much room as the host allows. A frame that passt cannot send at once is
/// dropped, and sent again only after a while.
fn have_room(socket: &UnixStream) {
    let room: libc::c_int = 8 << 20;
    // SAFETY: The value is a number of this size. The host allows less if it does not like it.
    unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const room).cast(),
            size_of_val(&room) as libc::socklen_t,
        )
    };
}

/// Opens a tap interface.
fn tap(name: &str) -> Result<(OwnedFd, u16)> {
    const DEVICE: &str = "/dev/net/tun";
    const TUNSETIFF: libc::c_ulong = 0x4004_54CA;
    let hint = format!("as root: ip tuntap add {name} mode tap user {}; ip link set {name} up", user());
    let directory = Path::new("/sys/class/net").join(name);
    let Ok(mtu) = std::fs::read_to_string(directory.join("mtu")) else {
        return Err(Error::new(format!("there is no interface {name}")).hint(hint));
    };
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE);
    let file: File = opened.map_err(|error| Error::file("open", Path::new(DEVICE), error))?;
    // SAFETY: All zeros are a valid request. The fields of this call are set, and its name ends
    // with a zero.
    let done = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
        libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request)
    };
    if done != 0 {
        let error = io::Error::last_os_error();
        let refused = Error::new(format!("cannot open the interface {name}: {error}"));
        return Err(match error.raw_os_error() {
            Some(libc::EBUSY) => refused.hint("another machine uses the interface: choose another one"),
            _ => refused.hint(hint),
        });
    }
    Ok((file.into(), mtu.trim().parse().unwrap_or(1500)))
}

fn user() -> u32 {
    // SAFETY: It takes nothing.
    unsafe { libc::geteuid() }
}
