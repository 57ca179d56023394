//! `lab bench subnet`: TCP between two hosted machines, on a subnet and by the host's network.

use std::{path::PathBuf, process::Command};

use mercury_lab::{
    artefacts,
    error::{Error, Result},
    image::{Image, Release},
    markdown::table,
    paths,
    previrtualization::{self, Flavour},
};
use serde::Serialize;

use crate::{running::Running, stats::median};

/// The heading of this section in docs/benchmarks.md.
pub const HEADING: &str = "## TCP between hosted machines";
/// The key of this section in docs/benchmarks.json.
pub const KEY: &str = "subnet";

/// The goal: a stream on a subnet is so many times as fast as by interfaces of the host as they are by
/// default.
const AT_LEAST: f64 = 4.0;
const PORT: u16 = 8080;

/// A network of its own for two machines, with two interfaces on one bridge. `/sys` shows the network in
/// which it was mounted.
const BRIDGE: &str = "set -e
    mount -t sysfs sysfs /sys
    ip link add mercury-bridge type bridge
    for name in mercury0 mercury1; do
        ip tuntap add $name mode tap
        ip link set $name mtu $0
        ip link set $name master mercury-bridge
        ip link set $name up
    done
    ip link set mercury-bridge up
    echo ready
    exec sleep 9999";
/// The length of packets on an interface by default, and the longest one.
const MTUS: [u32; 2] = [1500, 65521];
/// A server: it answers single bytes, or sends a stream of so many MiB.
const SERVER: &str = r#"import socket
l = socket.create_server(("", 8080))
print("list" + "ening", flush=True)
b = bytes(1 << 20)
while True:
    s = l.accept()[0]
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if s.recv(1) == b"r":
        while s.recv(1): s.sendall(b"x")
    else:
        for _ in range(int.from_bytes(s.recv(4), "big")): s.sendall(b)
    s.close()
"#;
/// A client: it prints MiB in a second, and the microseconds of a round trip.
const CLIENT: &str = r#"import socket, sys, time
address, port, mib, trips = sys.argv[1], *map(int, sys.argv[2:])
def connect(kind):
    s = socket.create_connection((address, port))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.sendall(kind)
    return s
s = connect(b"s")
t = time.monotonic()
s.sendall(mib.to_bytes(4, "big"))
v, count = memoryview(bytearray(1 << 20)), 0
while n := s.recv_into(v): count += n
assert count == mib << 20
rate = mib / (time.monotonic() - t)
s = connect(b"r")
t = time.monotonic()
for _ in range(trips): s.sendall(b"x"); s.recv(1)
print("fig" + "ures", rate, (time.monotonic() - t) / trips * 1e6, flush=True)
"#;

/// Isolations, with the words for them and their keys.
const ISOLATIONS: [(&str, &str, &str); 2] = [
    ("no isolation", "none", "--isolation=none"),
    ("`--isolation=process`", "process", "--isolation=process"),
];

/// The size of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub rounds: usize,
    pub mib: usize,
    pub trips: usize,
}

/// The figures of both isolations.
#[derive(Debug, Serialize)]
pub struct Figures {
    isolations: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    isolation: &'static str,
    subnet: Way,
    /// Interfaces of the host on a bridge, as they are by default.
    bridge: Way,
    /// The same with packets as long as they can be.
    bridge_long: Way,
}

/// Medians of a way between two machines.
#[derive(Debug, Serialize)]
struct Way {
    mib_per_s: f64,
    round_trip_us: f64,
}

impl Row {
    fn ratio(&self) -> f64 {
        self.subnet.mib_per_s / self.bridge.mib_per_s
    }
}

/// Measures all ways, by turns.
///
/// # Errors
/// If a part of the project does not build, a machine does not come up, or the host allows no network of
/// one's own.
pub fn measure(release: Release, plan: Plan) -> Result<Figures> {
    let place = Place::new(release)?;
    let row = |&(_, key, isolation): &(&str, &'static str, &str)| {
        let mut samples = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..plan.rounds {
            samples[0].push(place.by_subnet(isolation, plan)?);
            samples[1].push(place.by_bridge(isolation, MTUS[0], plan)?);
            samples[2].push(place.by_bridge(isolation, MTUS[1], plan)?);
        }
        let [subnet, bridge, bridge_long] = samples.map(|samples| {
            let of =
                |at: usize| median(&samples.iter().map(|sample: &[f64; 2]| sample[at]).collect::<Vec<_>>());
            Way { mib_per_s: of(0).round(), round_trip_us: of(1).round() }
        });
        Ok(Row { isolation: key, subnet, bridge, bridge_long })
    };
    Ok(Figures { isolations: ISOLATIONS.iter().map(row).collect::<Result<_>>()? })
}

/// The files of the machines.
struct Place {
    mercury: PathBuf,
    vmlinux: PathBuf,
    disk: PathBuf,
    directory: PathBuf,
}

impl Place {
    fn new(release: Release) -> Result<Self> {
        Ok(Self {
            vmlinux: previrtualization::build(release, Flavour::PreVirtualized)?.vmlinux,
            mercury: artefacts::build_hosted()?,
            disk: Image::ensure(release)?.disk(),
            directory: paths::lab_dir("bench")?,
        })
    }

    /// Starts a machine with a network card, in this process's network or in that of another process.
    fn machine(&self, name: &str, isolation: &str, net: &str, within: Option<u32>) -> Result<Guest> {
        let mut command = match within {
            Some(process) => {
                let mut command = Command::new("nsenter");
                command.args(["--target", &process.to_string(), "--user", "--net", "--mount"]);
                command.arg("--preserve-credentials").arg(&self.mercury);
                command
            }
            None => Command::new(&self.mercury),
        };
        command.args(["hosted", "run", isolation, "--memory", "512", "--kernel"]).arg(&self.vmlinux);
        command.args(["--disk", &format!("{},ro", self.disk.display()), "--net", net]);
        command.args(["--append", "root=/dev/vda ro init=/bin/sh"]);
        let log = self.directory.join(format!("subnet-{name}.log"));
        let mut guest = Guest { machine: Running::start(&mut command, &log)?, commands: 0 };
        guest.machine.wait_for("Run /bin/sh as init")?;
        guest.run(
            "PS1=; stty -echo; export PATH=/usr/bin:/bin:/usr/sbin:/sbin; mount -t proc p /proc; \
             mount -t devtmpfs d /dev; mount -t tmpfs t /tmp; ip link set eth0 up",
        )?;
        Ok(guest)
    }

    fn by_subnet(&self, isolation: &str, plan: Plan) -> Result<[f64; 2]> {
        let net = format!("subnet=bench-{}", std::process::id());
        let server = self.machine("server", isolation, &net, None)?;
        let client = self.machine("client", isolation, &net, None)?;
        exchange(server, client, plan)
    }

    fn by_bridge(&self, isolation: &str, mtu: u32, plan: Plan) -> Result<[f64; 2]> {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "--mount", "sh", "-c", BRIDGE, &mtu.to_string()]);
        let mut bridge = Running::start(&mut command, &self.directory.join("subnet-bridge.log"))?;
        bridge.wait_for("ready\n")?;
        let within = Some(bridge.process());
        let server = self.machine("server", isolation, "tap=mercury0", within)?;
        let client = self.machine("client", isolation, "tap=mercury1", within)?;
        exchange(server, client, plan)
    }
}

/// Runs the server and the client. Returns MiB in a second, and microseconds of a round trip.
fn exchange(mut server: Guest, mut client: Guest, plan: Plan) -> Result<[f64; 2]> {
    server.run("ip address add 10.9.0.2/24 dev eth0")?;
    client.run("ip address add 10.9.0.1/24 dev eth0")?;
    server.write("/tmp/server.py", SERVER)?;
    client.write("/tmp/client.py", CLIENT)?;
    server.machine.type_line("python3 /tmp/server.py")?;
    server.machine.wait_for("listening\n")?;
    client
        .machine
        .type_line(&format!("python3 /tmp/client.py 10.9.0.2 {PORT} {} {}", plan.mib, plan.trips))?;
    let line = client.machine.wait_for("figures ")?;
    let mut numbers = line.split_whitespace().filter_map(|word| word.parse().ok());
    let mut next = || numbers.next().ok_or_else(|| Error::Host(format!("strange figures: {line}")));
    Ok([next()?, next()?])
}

/// A machine with a shell on its console.
struct Guest {
    machine: Running,
    commands: usize,
}

impl Guest {
    /// Runs a line to its end.
    fn run(&mut self, line: &str) -> Result<()> {
        self.commands += 1;
        self.machine.type_line(&format!("{line}; echo do''ne {}", self.commands))?;
        self.machine.wait_for(&format!("done {}\n", self.commands)).map(drop)
    }

    /// Writes a file in the machine.
    fn write(&mut self, path: &str, text: &str) -> Result<()> {
        self.run(&format!("cat > {path} <<'END'\n{text}END\ntrue"))
    }
}

/// Returns the promises, and if they are kept.
#[must_use]
pub fn promises(figures: &Figures) -> Vec<(bool, &'static str)> {
    let is_fast = figures.isolations.iter().all(|row| row.ratio() >= AT_LEAST);
    vec![(is_fast, "a stream between two hosted machines is slower than promised")]
}

/// Returns the section in docs/benchmarks.md.
#[must_use]
pub fn section(figures: &Figures) -> String {
    let is_kept = promises(figures).iter().all(|(kept, _)| *kept);
    let header = ["", "stream", "to the bridge's", "round trip"];
    let rows: Vec<Vec<String>> = figures.isolations.iter().flat_map(rows).collect();
    format!(
        "{HEADING}\n\n\
        `lab bench subnet` writes this section alone. Two machines of 512 MiB with the small kernel and \
        Debian's\n\
        python3 exchange a stream and single bytes by TCP: on one subnet (`--net subnet=`), or by two \
        interfaces of\n\
        the host on a bridge (`--net tap=`). Interfaces have packets of {} bytes by default, and of {} \
        bytes at most.\n\
        The ways take turns; the figures are medians. The goal for a stream is {AT_LEAST} times that of the \
        bridge by\n\
        default at least ({}).\n\n{}",
        MTUS[0],
        MTUS[1],
        if is_kept { "kept" } else { "**missed**" },
        table(&header, &rows)
    )
}

fn rows(row: &Row) -> [Vec<String>; 3] {
    let words = ISOLATIONS.iter().find(|(_, key, _)| *key == row.isolation).map_or("", |(words, _, _)| words);
    let cells = |what: &str, way: &Way| {
        let (rate, trip) = (format!("{:.0} MiB/s", way.mib_per_s), format!("{:.0} µs", way.round_trip_us));
        vec![format!("{words}, {what}"), rate, format!("{:.1} ×", way.mib_per_s / row.bridge.mib_per_s), trip]
    };
    [
        cells("subnet", &row.subnet),
        cells("bridge", &row.bridge),
        cells("bridge, long packets", &row.bridge_long),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(subnet: f64) -> Figures {
        let way = |mib_per_s| Way { mib_per_s, round_trip_us: 100.0 };
        let (bridge, bridge_long) = (way(100.0), way(200.0));
        Figures { isolations: vec![Row { isolation: "process", subnet: way(subnet), bridge, bridge_long }] }
    }

    #[test]
    fn a_slow_subnet_breaks_the_promise() {
        assert!(promises(&figures(400.0))[0].0 && !promises(&figures(399.0))[0].0);
        let text = section(&figures(150.0));
        assert!(text.contains("(**missed**)") && text.contains("1.5 ×"), "{text}");
    }
}
