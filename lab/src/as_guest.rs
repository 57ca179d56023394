//! Bare machines that go on as guests of a host with KVM: `mercury restore --as-guest`.
//!
//! The source is a machine like metal. It writes its image to a disk of its own, and ends. The host is
//! another machine, which gets that disk. Two ports of the host lead from the lab to the guest in it: to its
//! first serial port, the console, and to its second one, the agent's.

use std::{path::Path, thread, time::Duration};

use mercury_lab_agent::protocol::Request;

use crate::{
    artefacts,
    client::Client,
    command::{Background, patient},
    emulator::file,
    error::{Error, Result, wait_for},
    kernel::Kernel,
    link::{Link, System},
    machine::Machine,
    moving::pairing,
    operator, restart,
    spec::{Bus, Nic, Qemu, Spec},
};

/// The guest's name in its host.
pub const NAME: &str = "lab";
/// The disk with the image, in the host.
pub const IMAGE: &str = "/dev/vda";
/// The source's root disk, and the disk with its artefacts, in a host that has them.
pub const ROOT: &str = "/dev/vdb";
pub const ARTEFACTS: &str = "/dev/vdc";
/// The source's second disk, in a host that has it.
pub const DATA: &str = "/dev/vdd";

/// The disk for the image, in the source. NVMe disks are numbered as they are found.
const IMAGE_AT_SOURCE: &str =
    "/dev/$(basename $(dirname $(dirname $(grep -ls mercury-disk0 /sys/block/nvme*/device/serial))))";
const IMAGE_MIB: u32 = 1024;
/// The script that joins a socket of the monitor to a port of the host.
const RELAY: &str = include_str!("../guest/as-guest/relay");
/// The monitor's sockets, and the ports of the host that lead to them.
const PORTS: [(&str, &str); 2] = [("serial1.sock", file::GUEST_AGENT), ("console.sock", file::GUEST_CONSOLE)];
/// Time limit from the monitor's start to the agent's answer. The monitor reads the image first.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the description of a machine like metal, whose root lies in RAM, with a disk for its image.
#[must_use]
pub fn source(kernel: Kernel, cpus: u32) -> Spec {
    in_ram(metal(kernel, cpus)).nic(Nic::E1000e)
}

/// Returns the description of a machine like metal with a disk for its image, and without a network.
#[must_use]
pub fn metal(kernel: Kernel, cpus: u32) -> Spec {
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    let spec = Spec::new(kernel).metal().cpus(cpus).memory_mib(512);
    spec.disk(Bus::Nvme, IMAGE_MIB).qemu_version(Qemu::Newer)
}

/// Lets a machine's root lie in RAM.
#[must_use]
pub fn in_ram(spec: Spec) -> Spec {
    spec.kernel_arg("lab.root=small")
}

/// Joins a tap interface for the guest, `tap0`, with the host's only card to a bridge, which gets the card's
/// place in the network.
///
/// # Errors
/// If the host does not.
pub fn bridge(host: &Machine, address: &str) -> Result<()> {
    host.sh("modprobe -a virtio_net tun bridge")?;
    let card = "card=$(ls /sys/class/net | grep -v -e lo -e tap -e bridge | head -1)";
    let all = "ip link add bridge0 type bridge forward_delay 0; ip tuntap add tap0 mode tap; \
        ip address flush dev $card; ip link set $card master bridge0 up; ip link set tap0 master bridge0 up; \
        ip link set bridge0 up";
    host.sh(&format!("set -e; {card}; {all}; ip address add {address}/24 dev bridge0")).map(drop)
}

/// Returns the description of a machine like metal, whose root and artefacts lie on disks on NVMe, with
/// another one for its image.
#[must_use]
pub fn source_on_nvme(kernel: Kernel, cpus: u32) -> Spec {
    on_nvme(metal(kernel, cpus)).nic(Nic::E1000e)
}

/// Lets a machine's disks on NVMe be those of bare metal, whose controllers have no shadow doorbells.
#[must_use]
pub fn on_nvme(spec: Spec) -> Spec {
    spec.qemu_arg("-global").qemu_arg("nvme.dbcs=off")
}

/// Returns the kernel's name of the disk on NVMe with this serial number.
///
/// # Errors
/// If the machine has none.
pub fn disk(machine: &Machine, serial: &str) -> Result<String> {
    machine.sh(&format!("basename $(dirname $(dirname $(grep -ls {serial} /sys/block/nvme*/device/serial)))"))
}

/// Returns the device file of the virtio disk with this serial number.
///
/// # Errors
/// If the machine has none.
pub fn virtio_disk(machine: &Machine, serial: &str) -> Result<String> {
    machine.sh(&format!("echo /dev/$(basename $(dirname $(grep -ls '^{serial}$' /sys/block/vd*/serial)))"))
}

/// Writes the source to its disk. The source is off in the end.
///
/// # Errors
/// If the source is not off in time.
pub fn checkpoint(source: &Machine) -> Result<()> {
    checkpoint_with(source, "")
}

/// Writes the source to its disk as [`checkpoint`] does, with options of the command.
///
/// # Errors
/// As for [`checkpoint`].
pub fn checkpoint_with(source: &Machine, options: &str) -> Result<()> {
    restart::checkpoint(source, options, IMAGE_AT_SOURCE)
}

/// Returns the description of a host with KVM and with the image's disk of a source that is off.
#[must_use]
pub fn host(kernel: Kernel, source: &Machine) -> Spec {
    // The source's QEMU: another version has another processor.
    let spec = Spec::new(kernel).cpus(2).memory_mib(1280).qemu_version(Qemu::Newer);
    with_ports(with_disk(spec, "image", &qcow2(&source.link().scene.dir().join(file::disk(0)))))
}

/// Adds the ports that lead to a guest in a machine.
#[must_use]
pub fn with_ports(spec: Spec) -> Spec {
    PORTS.iter().fold(spec, |spec, (_, port)| {
        let socket = format!("socket,id={port},path={port},server=on,wait=off,logfile={port}.log");
        let device = format!("virtserialport,chardev={port},name={port}");
        ["-chardev", &socket, "-device", &device].into_iter().fold(spec, Spec::qemu_arg)
    })
}

/// Returns the description of a host that has all disks of a source on NVMe: [`IMAGE`], [`ROOT`],
/// [`ARTEFACTS`], and [`DATA`] if the source has it.
///
/// # Errors
/// If the artefacts cannot be found.
pub fn host_with_disks(kernel: Kernel, source: &Machine, theirs: Kernel) -> Result<Spec> {
    let artefacts = artefacts::ensure(theirs.release())?.disk;
    let folder = source.link().scene.dir();
    let spec = with_disk(host(kernel, source), "theirs", &qcow2(&folder.join(file::ROOT)));
    let artefacts = format!("format=raw,read-only=on,file={}", escaped(&artefacts));
    let spec = with_disk(spec, "tools", &artefacts);
    let data = folder.join(file::disk(1));
    Ok(if data.exists() { with_disk(spec, "data", &qcow2(&data)) } else { spec })
}

fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

fn qcow2(path: &Path) -> String {
    format!("format=qcow2,cache=unsafe,file={}", escaped(path))
}

/// Adds a disk, which the host finds by its serial number.
fn with_disk(spec: Spec, id: &str, backing: &str) -> Spec {
    let (drive, device) =
        (format!("if=none,id={id},{backing}"), format!("virtio-blk-pci,drive={id},serial={id}"));
    ["-drive", &drive, "-device", &device].into_iter().fold(spec, Spec::qemu_arg)
}

/// A machine that goes on as a guest of another one.
#[derive(Debug)]
pub struct Guest<'a> {
    host: &'a Machine,
    link: Link,
    monitor: Background,
}

impl System for Guest<'_> {
    fn link(&self) -> &Link {
        &self.link
    }

    fn worked(&self) -> Result<Duration> {
        self.host.worked()
    }
}

impl<'a> Guest<'a> {
    /// Starts the image's machine as a guest, and waits until its agent answers. `options` are for the
    /// command.
    ///
    /// # Errors
    /// If the command ends, or the agent does not answer.
    pub fn start(host: &'a Machine, options: &str) -> Result<Self> {
        Self::start_from(host, IMAGE, options)
    }

    /// Starts the machine of another image as [`Guest::start`] does.
    ///
    /// # Errors
    /// As for [`Guest::start`].
    pub fn start_from(host: &'a Machine, image: &str, options: &str) -> Result<Self> {
        let line = format!("exec mercury restore {image} --as-guest --name {NAME} {options}");
        let mut guest = Self::of(host, &line)?;
        guest.wait()?;
        Ok(guest)
    }

    /// Lets a host in use wait for a machine that moves to it. Returns the words for `mercury migrate` too.
    /// `options` are for the command.
    ///
    /// # Errors
    /// If the command does not wait.
    pub fn receive(host: &'a Machine, options: &str) -> Result<(Self, String)> {
        let line = format!("exec mercury receive --beside --name {NAME} {options}");
        let mut guest = Self::of(host, &line)?;
        let words = pairing(&mut guest.monitor)?;
        Ok((guest, words))
    }

    /// Starts the command that runs a guest, and what leads from the guest to the lab.
    fn of(host: &'a Machine, line: &str) -> Result<Self> {
        host.sh("modprobe kvm_amd")?;
        let client = Client::new(connect(host, file::GUEST_AGENT)?)?;
        let link = Link::new(client, host.link().scene.clone(), None, 0);
        // The emulator takes no text, and logs none, while nobody listens.
        let mut console = connect(host, file::GUEST_CONSOLE)?;
        thread::spawn(move || std::io::copy(&mut console, &mut std::io::sink()));
        let guest = Self { host, link, monitor: host.spawn(line)? };
        host.put("/run/relay", RELAY.as_bytes(), 0o755)?;
        for (socket, port) in PORTS {
            host.sh(&format!(
                "setsid /run/relay /run/mercury/guests/{NAME}/{socket} {port} > /run/{port} 2>&1 &"
            ))?;
        }
        Ok(guest)
    }

    /// Waits until the agent in the guest answers.
    ///
    /// # Errors
    /// If the command ends, or the agent does not answer in time.
    pub fn wait(&mut self) -> Result<()> {
        let up = wait_for("the guest to go on", patient(LIMIT), || {
            self.refuse_ended()?;
            self.link.client.send(&Request::Hello)?;
            self.link.client.hello_after(0, Duration::from_secs(1))
        });
        up.map(drop).map_err(|error| {
            let dmesg = self.host.sh("dmesg | tail -40");
            println!("{:?}\n{}\n{dmesg:?}", self.printed(), self.console());
            self.host.blame(error)
        })
    }

    /// Returns what the command that runs the guest has printed.
    ///
    /// # Errors
    /// If the host does not answer.
    pub fn printed(&mut self) -> Result<String> {
        Ok(self.monitor.output_so_far()? + &self.monitor.errors_so_far()?)
    }

    fn refuse_ended(&mut self) -> Result<()> {
        let Some(exit) = self.monitor.exit_so_far()? else { return Ok(()) };
        let said = self.printed()?;
        Err(Error::Gone(format!("the guest's monitor ended ({exit:?}): {said}")))
    }

    /// Returns the text of the guest's first serial port, since it is a guest.
    #[must_use]
    pub fn console(&self) -> String {
        let log = self.link.scene.dir().join(file::GUEST_CONSOLE).with_extension("log");
        String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned()
    }

    /// Checks that the kernel of the guest has no complaint.
    ///
    /// # Errors
    /// With the complaints.
    pub fn check_log(&self) -> Result<()> {
        operator::check_log(&self.link)
    }

    /// Runs a command line that must succeed in the guest. Returns its standard output.
    ///
    /// # Errors
    /// If the command does not succeed.
    pub fn sh(&self, line: &str) -> Result<String> {
        self.link.sh(line)
    }

    /// Lets the guest's kernel write everything to its disks and power the guest off. Returns the words of
    /// the command that ran the guest.
    ///
    /// # Errors
    /// If the guest does not end, or the command fails.
    pub fn power_off(self) -> Result<String> {
        const KEYS: &str = "sleep 1; for key in s u o; do echo $key > /proc/sysrq-trigger; sleep 2; done";
        self.link.sh(&format!("setsid sh -c '{KEYS}' > /dev/null 2>&1 &"))?;
        let ended = self.monitor.wait(LIMIT)?.check()?;
        Ok(format!("{}{}", ended.stdout, ended.stderr))
    }

    /// Waits for the end of the command that runs the guest, whose machine powers itself off. Returns the
    /// command's words.
    ///
    /// # Errors
    /// If the command does not end, or fails.
    pub fn ends(self) -> Result<String> {
        let ended = self.monitor.wait(LIMIT)?.check()?;
        Ok(ended.stdout + &ended.stderr)
    }

    /// Ends the guest as a power cut would, and waits for the end of the command that runs the guest. Returns
    /// the commands' words.
    ///
    /// # Errors
    /// If a command fails, or does not end.
    pub fn stop(self) -> Result<String> {
        let stopped = self.host.sh(&format!("mercury guests stop {NAME}"))?;
        let ended = self.monitor.wait(LIMIT)?.check()?;
        Ok(format!("{}\n{}", stopped, ended.stdout.trim_end()))
    }
}

fn connect(host: &Machine, socket: &str) -> Result<std::os::unix::net::UnixStream> {
    use crate::error::Context;
    host.link().scene.connect(socket).context(|| format!("connect to the host's {socket}"))
}
