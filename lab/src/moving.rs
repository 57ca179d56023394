//! Machines that move. Two machines hang on two ports of a switch. The switch is a third machine,
//! which is also the server of the root file system and the peer that talks to the moving machine.

use std::{thread, time::Duration};

use serde_json::json;

use crate::{
    command::{Background, patient},
    driver::Variant,
    error::{Error, Result, wait_for},
    host,
    kernel::Kernel,
    machine::Machine,
    reservation::Reservation,
    restart::{
        script::{ECHO, EXPORTS, TELL},
        start,
    },
    spec::{Bus, Nic, Qemu, Spec},
};

/// Time limit of a move.
pub const LIMIT: Duration = Duration::from_secs(240);

/// Time limit of a check on a machine that does not move.
const CHECK_LIMIT: Duration = Duration::from_secs(20);
/// The last text of a destination on its console.
pub const GOES_ON: &str = "going on in the machine";

/// The switch's own address.
pub const PEER: &str = "10.9.0.1";
/// The address of the machine that moves.
pub const MOVING: &str = "10.9.0.2";

/// The command that makes the third machine's cards the ports of a switch.
const SWITCH: &str = "modprobe -a virtio_net bridge; ip link add switch type bridge forward_delay 0; \
    for card in $(ls /sys/class/net | grep -v -e lo -e switch); do ip link set $card master switch up; done; \
    ip address add 10.9.0.1/24 dev switch; ip link set switch up";

/// The text of a waiting destination on its console.
pub const WAITS: &str = "mercury: waiting for a machine at";

fn spec(kernel: Kernel) -> Spec {
    // QEMU 7 runs stale copies of code that the kernel has patched, and the kernel patches code
    // during a snapshot.
    Spec::new(kernel).modules(Variant::Faults).qemu_version(Qemu::Newer)
}

fn card(spec: Spec, id: u8, netdev: &str) -> Spec {
    card_of(Nic::Virtio, spec, id, netdev)
}

fn card_of(nic: Nic, spec: Spec, id: u8, netdev: &str) -> Spec {
    let netdev = format!("{netdev},id=cable{id}");
    let device = format!("{},netdev=cable{id},romfile=,mac=52:54:00:09:00:{id:02x}", nic.model());
    ["-netdev", &netdev, "-device", &device].into_iter().fold(spec, Spec::qemu_arg)
}

/// The switch, with places 2 and 3 for machines, and more if there is room for more than two machines.
#[derive(Debug)]
pub struct Switch {
    /// The machine that is the switch.
    pub peer: Machine,
    /// Ports of this host, from place 2 on.
    ports: Vec<u16>,
    slots: Reservation,
}

impl Switch {
    /// Boots the switch, with room on this host for two more machines with the switch's own kernel.
    ///
    /// # Errors
    /// If the switch does not come up.
    pub fn boot() -> Result<Self> {
        Self::boot_for(Kernel::BookwormCloud)
    }

    /// Boots the switch, with room on this host for two more machines with this kernel.
    ///
    /// # Errors
    /// If the switch does not come up.
    pub fn boot_for(others: Kernel) -> Result<Self> {
        Self::boot_with(others, 2)
    }

    /// Boots the switch, with room on this host for so many more machines at a time, with this kernel.
    ///
    /// # Errors
    /// If the switch does not come up.
    pub fn boot_with(others: Kernel, count: usize) -> Result<Self> {
        let slots = Reservation::of(1 + count, &[Kernel::BookwormCloud, others])?;
        let ports = (0..count.max(2)).map(|_| host::free_port()).collect::<Result<Vec<_>>>()?;
        let peer = spec(Kernel::BookwormCloud).cpus(1).memory_mib(768);
        let peer = (0x11..)
            .zip(&ports)
            .fold(peer, |peer, (id, port)| card(peer, id, &format!("socket,listen=127.0.0.1:{port}")));
        let peer = Machine::boot_reserved(peer, &slots)?;
        peer.sh(SWITCH)?;
        start(&peer, "exports", EXPORTS, "")?;
        start(&peer, "echo", ECHO, "")?;
        Ok(Self { peer, ports, slots })
    }

    /// Returns the description of a machine at this place.
    #[must_use]
    pub fn plugged(&self, kernel: Kernel, cpus: u32, memory_mib: u32, place: u8) -> Spec {
        let spec = spec(kernel).cpus(cpus).memory_mib(memory_mib);
        card(spec, place, &format!("socket,connect=127.0.0.1:{}", self.ports[usize::from(place) - 2]))
    }

    /// Puts a machine like metal at place 2.
    #[must_use]
    pub fn plug_metal(&self, spec: Spec) -> Spec {
        self.plug_metal_at(spec, 2, Nic::E1000e)
    }

    /// Puts a machine like metal at this place, with this card.
    #[must_use]
    pub fn plug_metal_at(&self, spec: Spec, place: u8, nic: Nic) -> Spec {
        let port = self.ports[usize::from(place) - 2];
        card_of(nic, spec, place, &format!("socket,connect=127.0.0.1:{port}"))
    }

    /// Puts another machine at place 2, whose machine is off. Its card has an address of its own.
    #[must_use]
    pub fn plug_instead(&self, spec: Spec) -> Spec {
        card(spec, 4, &format!("socket,connect=127.0.0.1:{}", self.ports[0]))
    }

    /// Returns the description of a machine at this place whose devices QEMU can move too.
    #[must_use]
    pub fn movable_by_qemu(&self, kernel: Kernel, cpus: u32, memory_mib: u32, place: u8) -> Spec {
        self.plugged(kernel, cpus, memory_mib, place).root_bus(Bus::Virtio)
    }

    /// Boots the machine that moves: it is plugged in, and its root is on the switch.
    ///
    /// # Errors
    /// If the machine does not come up.
    pub fn boot_moving(&self, spec: Spec) -> Result<Machine> {
        Machine::boot_reserved(moving(spec), &self.slots)
    }

    /// Boots any other machine.
    ///
    /// # Errors
    /// If the machine does not come up.
    pub fn boot_other(&self, spec: Spec) -> Result<Machine> {
        Machine::boot_reserved(spec, &self.slots)
    }

    /// Starts an endless stream of data to the moving machine, which already listens.
    ///
    /// # Errors
    /// If the stream does not start.
    pub fn tell(&self) -> Result<()> {
        start(&self.peer, "tell", TELL, MOVING)
    }
}

/// Returns the description of the machine that moves, whose root is on the switch.
#[must_use]
pub fn moving(spec: Spec) -> Spec {
    spec.kernel_arg(&format!("lab.nfs={PEER},{MOVING}"))
}

/// Returns how often a machine's console shows a text.
#[must_use]
pub fn times(machine: &Machine, text: &str) -> usize {
    machine.serial_log().matches(text).count()
}

/// Waits until a machine runs on at the destination, more often than `before`, or the command has
/// ended. Returns true if the machine runs on.
///
/// # Errors
/// If neither happens; with the state of `from`.
pub fn arrives(
    from: &Machine,
    destination: &Machine,
    before: usize,
    moving: &mut Background,
) -> Result<bool> {
    arrives_showing(from, destination, before, moving, |_| {})
}

/// Waits as [`arrives`] does. Calls `show` again and again with the last line that the moving
/// command has printed.
fn arrives_showing(
    from: &Machine,
    destination: &Machine,
    before: usize,
    moving: &mut Background,
    mut show: impl FnMut(&str),
) -> Result<bool> {
    wait_for("the machine to arrive", patient(LIMIT), || {
        // The machine's last words may be lost with the machine.
        let printed = moving.errors_so_far().unwrap_or_default();
        if let Some(last) = printed.lines().rev().find(|line| !line.trim().is_empty()) {
            show(last.trim());
        }
        let has_arrived = times(destination, GOES_ON) > before;
        Ok((has_arrived || moving.has_ended().unwrap_or(true)).then_some(has_arrived))
    })
    .map_err(|error| {
        let looks = "ps axo stat,wchan:32,args | grep -v '\\]$'; cat /proc/$(pgrep -f '^mercury \
            migrate')/stack; dmesg | tail -20";
        let at =
            from.command(looks).timeout(CHECK_LIMIT).run().map(|output| output.stdout).unwrap_or_default();
        println!(
            "{}{}{at}",
            moving.output_so_far().unwrap_or_default(),
            moving.errors_so_far().unwrap_or_default()
        );
        destination.blame_examined(from.blame(error))
    })
}

/// Moves a machine to a waiting destination, which has printed `words`. Returns the text about the
/// move on the machine's console. The machine is off then, and the destination runs it.
///
/// # Errors
/// If the machine does not arrive, with the text of both consoles.
pub fn move_to(machine: &Machine, destination: &Machine, words: &str, options: &str) -> Result<String> {
    move_showing(machine, destination, words, options, |_| {})
}

/// Moves a machine as [`move_to`] does. Calls `show` again and again with the last line that the
/// moving command has printed.
///
/// # Errors
/// As for [`move_to`].
pub fn move_showing(
    machine: &Machine,
    destination: &Machine,
    words: &str,
    options: &str,
    show: impl FnMut(&str),
) -> Result<String> {
    let (boots, before) = (destination.boots(), times(destination, GOES_ON));
    let mut moving = machine.spawn(&migrate(words, options))?;
    if !arrives_showing(machine, destination, before, &mut moving, show)? {
        let why = format!("{}{}", moving.output_so_far()?, moving.errors_so_far()?);
        let why = format!("the machine has not moved: {why}\n{}", said(machine));
        return Err(destination.blame_examined(machine.blame_examined(Error::Unhealthy(why))));
    }
    // The destination first: its processes may say something of themselves while it stands still.
    destination.wait_other(boots)?;
    machine.wait_shutdown(LIMIT).map(|_| said(machine))
}

/// Waits until the console has shown the text more often than `before`.
///
/// # Errors
/// If the console does not show it.
pub fn wait_more(machine: &Machine, text: &str, before: usize) -> Result<()> {
    let pattern = format!("(?s)(?:{text}.*){{{}}}", before + 1);
    machine.wait_serial(&pattern, LIMIT).map(drop)
}

/// Gives a machine's only card an address.
///
/// # Errors
/// If the machine has no card.
pub fn plug_in(machine: &Machine, address: &str) -> Result<()> {
    machine.sh("modprobe virtio_net")?;
    let card = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1)";
    machine.sh(&format!("{card}; ip address add {address}/24 dev $card && ip link set $card up")).map(drop)
}

/// Starts `mercury receive` on a machine. Returns the pairing token, which the source's command
/// needs.
///
/// # Errors
/// If the machine does not wait.
pub fn receive(destination: &Machine, address: &str) -> Result<String> {
    receive_with(destination, address, "--delay 4s")
}

/// Starts `mercury receive` as [`receive`] does, with a delay after the token was printed.
///
/// # Errors
/// If the machine does not wait.
pub fn receive_after(destination: &Machine, address: &str, delay: &str) -> Result<String> {
    receive_with(destination, address, &format!("--delay {delay}"))
}

/// Starts `mercury receive` as [`receive`] does, with these options.
///
/// # Errors
/// If the machine does not wait.
pub fn receive_with(destination: &Machine, address: &str, options: &str) -> Result<String> {
    let before = times(destination, WAITS);
    let mut receive = destination.spawn(&format!("mercury receive --listen {address} {options}"))?;
    let words = pairing(&mut receive)?;
    wait_more(destination, WAITS, before)?;
    Ok(words)
}

/// Returns the words for `mercury migrate` that `mercury receive` prints, as text or as JSON: the address and
/// the pairing token.
///
/// # Errors
/// If the command prints none.
pub fn pairing(receive: &mut Background) -> Result<String> {
    receive.wait_output("mercury-receive-1-", LIMIT)?;
    thread::sleep(Duration::from_millis(200));
    let said = receive.output_so_far()?;
    words_of(&said).ok_or_else(|| Error::Host(format!("`mercury receive` printed no pairing token: {said}")))
}

fn words_of(said: &str) -> Option<String> {
    let mut all = serde_json::Deserializer::from_str(said).into_iter::<serde_json::Value>();
    if let Some(Ok(report)) = all.next() {
        return Some(format!("{} --key {}", report["address"].as_str()?, report["key"].as_str()?));
    }
    let (_, words) = said.split_once("mercury migrate ")?;
    words.lines().next().map(str::to_owned)
}

/// Returns the command that moves a machine of the lab to the destination of `words`, which
/// [`receive`] has returned. A machine with neither UEFI nor a disk of its own has no place for a
/// tombstone.
#[must_use]
pub fn migrate(words: &str, options: &str) -> String {
    format!("mercury migrate {words} --without-tombstone {options}")
}

/// Returns the text about moves on the machine's console.
#[must_use]
pub fn said(machine: &Machine) -> String {
    let log = machine.serial_log();
    log.lines().filter(|line| line.contains("mercury migrate")).collect::<Vec<_>>().join("\n")
}

/// Unplugs the cable of the machine's card with this number, or plugs the cable in again.
///
/// # Errors
/// If the emulator has no such card.
pub fn plug(machine: &Machine, id: u8, is_in: bool) -> Result<()> {
    machine.qmp()?.execute("set_link", json!({"name": format!("cable{id}"), "up": is_in})).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_found_in_text_and_in_json() {
        let text =
            "on the machine that is to move here:\n  mercury migrate 10.9.0.3 --key mercury-receive-1-x\n";
        assert_eq!(words_of(text).as_deref(), Some("10.9.0.3 --key mercury-receive-1-x"));
        let json = r#"{"command": "receive", "key": "mercury-receive-1-x", "address": "10.9.0.3:4747"}"#;
        assert_eq!(words_of(json).as_deref(), Some("10.9.0.3:4747 --key mercury-receive-1-x"));
        assert_eq!(words_of("mercury: no network"), None);
    }
}
