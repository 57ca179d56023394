//! Devices at work, for the tests of snapshots and checkpoints. Each load knows the data that its
//! device must deliver, and checks every byte in every pass.

use std::{
    io::{self, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use mercury_lab::{
    Bus, Kernel, Machine, Nic, Result, Spec,
    restart::{comes_further, count},
};
use serde_json::json;

/// The contents of a disk at work, also kept as a file in memory: 32 MiB, of which no two pieces
/// are alike.
const PATTERN: &str = "/run/pattern";

/// A script that repeats a load. It counts the passes in `/run/NAME`, and ends with the error in
/// `/run/NAME.wrong`.
const AGAIN: &str = r#"
set -o pipefail
say() { echo $n > /run/NAME.new && mv /run/NAME.new /run/NAME; }
n=0
say
while test ! -e /run/end; do
    { PASS; } || { { echo "NAME, pass $n:"; tail -n 5 /run/NAME.said; } >> /run/NAME.wrong; exit 1; }
    n=$((n + 1))
    say
done
"#;

const NETWORK_UP: &str = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); \
     ip address add 10.0.2.15/24 dev $card && ip link set $card up; \
     until ping -c 1 -W 1 10.0.2.2 > /dev/null; do sleep 0.2; done";

/// A function that waits until a card has received a mebibyte more.
const RECEIVES: &str = "received() { cat /sys/class/net/*/statistics/rx_bytes | sort -n | tail -1; }; \
     before=$(received); until test $(received) -gt $((before + 1048576)); do sleep 0.2; done";

/// A command that restarts a card: QEMU's e1000e may receive nothing after a snapshot
/// (docs/limits.md).
const FRESH_CARD: &str = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1); \
     ip link set $card down; ip link set $card up";

/// The work of one device.
pub struct Load {
    name: String,
    prepare: String,
    pass: String,
}

impl Load {
    fn new(name: &str, prepare: &str, pass: &str) -> Self {
        Self { name: name.to_owned(), prepare: prepare.to_owned(), pass: pass.to_owned() }
    }

    /// Reads the root's disk, direct and buffered, with the caches dropped in between: devices
    /// write to fresh pages, and to the same ones again.
    pub fn root() -> Self {
        let sum = "cat /bin/* 2> /dev/null | md5sum";
        let file = disk_pass("/root/x", 0, 80);
        Self::new(
            "root",
            &format!("({sum} || true) > /run/root.sum"),
            &format!("({sum} || true) | cmp - /run/root.sum && echo 3 > /proc/sys/vm/drop_caches && {file}"),
        )
    }

    /// Reads a whole disk in the same two ways, and writes to another place of it.
    pub fn disk(disk: &str) -> Self {
        let same = |how: &str| format!("dd if={disk} count=32 bs=1M {how} status=none | cmp - {PATTERN}");
        let (direct, buffered) = (same("iflag=direct"), same(""));
        let written = disk_pass(disk, 128, 32);
        Self::new(
            &disk.replace("/dev/", "disk-"),
            &format!("dd if={PATTERN} of={disk} bs=1M oflag=direct status=none"),
            &format!("{direct} && {buffered} && echo 1 > /proc/sys/vm/drop_caches && {written}"),
        )
    }

    /// Receives numbers from the host for a while. `otherwise` is the command for when none have
    /// come.
    fn network(otherwise: &str) -> Self {
        let receive = format!("python3 /run/receive {}", source());
        Self::new("network", "", &format!("{receive} || {{ test $? -eq 124 && {otherwise}; }}"))
    }

    /// Reads random numbers. No 16 bytes come twice: a buffer that was not written to would hold
    /// the last ones.
    fn random_numbers() -> Self {
        Self::new(
            "random",
            "",
            "head -c 32000 /dev/hwrng > /run/random.bytes && test $(stat -c %s /run/random.bytes) = 32000 && \
             test -z \"$(od -An -v -tx1 /run/random.bytes | sort | uniq -d)\" && sleep 0.1",
        )
    }

    fn console() -> Self {
        Self::new("console", "", "python3 /run/console && sleep 0.1")
    }
}

/// Writes `count` pieces of the pattern, other ones in each pass, reads them back, and compares.
fn disk_pass(to: &str, place: u32, count: u32) -> String {
    let first = format!("$((n % {}))", 128 - count);
    let bytes = count << 18;
    format!(
        "dd if={PATTERN} of={to} bs=256k skip={first} seek={place} count={count} oflag=direct conv=notrunc \
         status=none && dd if={to} bs=256k skip={place} count={count} iflag=direct status=none | cmp -n \
         {bytes} -i 0:$(({first} * 262144)) - {PATTERN}"
    )
}

/// The devices of a machine, and their work.
pub struct Devices {
    pub spec: Spec,
    modules: &'static str,
    loads: Vec<Load>,
    /// The number of disks besides the root's and the artefacts'.
    pub disks: usize,
}

impl Devices {
    /// Changes the machine.
    pub fn with(self, change: impl FnOnce(Spec) -> Spec) -> Self {
        Self { spec: change(self.spec), ..self }
    }

    /// Chooses whether pages are zeroed before devices get them, as Debian does, which hides late
    /// writes of devices.
    pub fn zeroed(self, zeroed: bool) -> Self {
        self.with(|spec| spec.kernel_arg(&format!("init_on_alloc={}", u8::from(zeroed))))
    }

    /// Returns true if the machine has a balloon: see [`with_balloon`].
    pub fn has_balloon(&self) -> bool {
        self.modules.contains("balloon")
    }

    /// Boots the machine and starts its work.
    pub fn boot(&self) -> Result<Machine> {
        let machine = Machine::boot(self.spec.clone())?;
        self.start(&machine)?;
        Ok(machine)
    }

    /// Starts the work in a machine that was booted otherwise.
    pub fn start(&self, machine: &Machine) -> Result<()> {
        for module in self.modules.split_whitespace() {
            machine.sh(&format!("modprobe {module}"))?;
        }
        if machine.has_network() {
            machine.sh(NETWORK_UP)?;
        }
        machine.put("/run/receive", include_bytes!("../../guest/devices/receive"), 0o644)?;
        machine.put("/run/console", include_bytes!("../../guest/devices/console"), 0o644)?;
        machine.sh(&format!("head -c 32M /dev/urandom > {PATTERN}"))?;
        for Load { name, prepare, pass } in &self.loads {
            machine.sh(prepare)?;
            let script = AGAIN.replace("NAME", name).replace("PASS", pass);
            machine.put(&format!("/run/{name}.load"), script.as_bytes(), 0o644)?;
            machine.sh(&format!(
                "setsid bash /run/{name}.load > /run/{name}.said 2>&1 < /dev/null & \
                 until test -s /run/{name}; do sleep 0.1; done"
            ))?;
        }
        Ok(())
    }

    /// Checks that every load makes one more pass from now on, without an error, and goes on.
    pub fn go_on(&self, machine: &Machine) -> Result<()> {
        self.come_further_than(machine, |name| count(machine, name))?;
        if self.has("network") {
            machine.command(RECEIVES).timeout(Duration::from_secs(180)).run()?.check()?;
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.loads.iter().any(|load| load.name == name)
    }

    fn come_further_than(&self, machine: &Machine, before: impl Fn(&str) -> Result<u64>) -> Result<()> {
        for Load { name, .. } in &self.loads {
            comes_further(machine, name, before(name)?)?;
            machine.sh(&format!("pgrep -f '^bash /run/{name}.load'"))?;
        }
        Ok(())
    }

    pub fn end(&self, machine: &Machine) -> Result<()> {
        machine.sh("touch /run/end").map(drop)
    }
}

/// Returns the devices of virtual machines.
pub fn virtio() -> Devices {
    let spec = Spec::new(Kernel::BookwormCloud).cpus(2).nic(Nic::Virtio).disk(Bus::Virtio, 256);
    let echo = format!("socket,id=echo,host=127.0.0.1,port={}", echo());
    let more = [
        ["-device", "virtio-balloon-pci,id=balloon"],
        ["-device", "virtio-rng-pci"],
        ["-chardev", &echo],
        ["-device", "virtio-serial-pci,id=lines"],
        ["-device", "virtserialport,bus=lines.0,chardev=echo,name=mercury.echo"],
    ];
    Devices {
        spec: more.iter().flatten().fold(spec, |spec, argument| spec.qemu_arg(argument)),
        modules: "virtio_net virtio_balloon virtio_rng virtio_console",
        // Late data is no error: the emulator may be slow.
        loads: vec![
            Load::root(),
            Load::disk("/dev/vda"),
            Load::network("true"),
            Load::random_numbers(),
            Load::console(),
        ],
        disks: 1,
    }
}

/// Returns one more disk.
pub fn one_disk(disk: &str) -> Devices {
    Devices { spec: Spec::new(Kernel::BookwormCloud), modules: "", loads: vec![Load::disk(disk)], disks: 0 }
}

/// Returns the devices of physical servers.
pub fn real_hardware() -> Devices {
    let spec = Spec::new(Kernel::BookwormGeneric).cpus(2).root_bus(Bus::Ahci).nic(Nic::E1000e);
    Devices {
        spec: spec.disk(Bus::Nvme, 256).disk(Bus::Usb, 256),
        modules: "nvme e1000e xhci_pci usb_storage sd_mod",
        loads: vec![
            Load::root(),
            Load::disk("/dev/nvme0n1"),
            Load::disk("/dev/sdb"),
            Load::network(FRESH_CARD),
        ],
        disks: 2,
    }
}

/// Opens a port of this host, where each connection is served by itself. Returns the port.
fn serve(serves: impl Fn(TcpStream) + Clone + Send + 'static) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let serves = serves.clone();
            thread::spawn(move || serves(connection));
        }
    });
    port
}

/// Serves numbers until the client leaves. Returns the port. The first number of each 64 KiB says
/// how many there were.
fn source() -> u16 {
    let rest: Vec<u8> = (1..1_u32 << 14).flat_map(u32::to_le_bytes).collect();
    serve(move |mut connection| {
        let mut send = |number: u32| connection.write_all(&[&number.to_le_bytes(), &rest[..]].concat());
        let _gone = (0..).try_for_each(|number| send(number).map_err(drop));
    })
}

/// Serves an echo. Returns the port.
fn echo() -> u16 {
    serve(|mut connection| {
        let _gone = connection.try_clone().map(|mut from| io::copy(&mut from, &mut connection));
    })
}

/// Memory that the balloon takes.
const BALLOON_MIB: u64 = 96;

/// Makes the balloon take memory, or give it back, and waits for the end.
pub fn inflate(machine: &Machine, inflated: bool) -> Result<()> {
    let qmp = machine.qmp()?;
    let memory = qmp.execute("query-memory-size-summary", json!({}))?;
    let all = memory["base-memory"].as_u64().unwrap();
    let wanted = if inflated { all - (BALLOON_MIB << 20) } else { all };
    qmp.execute("balloon", json!({ "value": wanted }))?;
    let end = Instant::now() + Duration::from_secs(180);
    loop {
        let actual = qmp.execute("query-balloon", json!({}))?["actual"].as_u64().unwrap();
        if actual == wanted {
            return Ok(());
        }
        assert!(Instant::now() < end, "the balloon leaves {actual} bytes, not {wanted}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Makes the balloon take memory and give it back, again and again, while `done` runs.
pub fn with_balloon<T>(machine: &Machine, done: impl FnOnce() -> Result<T>) -> Result<T> {
    let end = AtomicBool::new(false);
    thread::scope(|scope| {
        let balloon = scope.spawn(|| -> Result<u32> {
            let mut breaths = 0;
            while breaths == 0 || !end.load(Ordering::Relaxed) {
                inflate(machine, true)?;
                inflate(machine, false)?;
                breaths += 1;
            }
            Ok(breaths)
        });
        let result = done();
        end.store(true, Ordering::Relaxed);
        println!("the balloon has breathed {} times", balloon.join().unwrap()?);
        result
    })
}
