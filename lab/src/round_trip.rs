//! A machine like metal with PostgreSQL that becomes a guest of a host in use and comes back to its hardware,
//! again and again. Clients on a third machine stay connected through all of it.

use std::time::Duration;

use serde_json::Value;

use crate::{
    as_guest::{self, Guest, NAME},
    error::{Error, Result},
    kernel::Kernel,
    ledger::{self, Ledger},
    link::System,
    machine::Machine,
    moving::{LIMIT, PEER, Switch, migrate, move_to, receive, said},
    restart::{
        boot_id, comes_further, count, is_well, nothing_wrong, results,
        script::{CLIENT, CLOCK, TALK},
        start,
    },
    spec::{Nic, Spec},
};

/// The clients that keep the ledger.
const CLIENTS: [&str; 2] = ["client0", "client1"];
/// Memory of the machine: room for a restore environment beside what arrives.
const MEMORY_MIB: u32 = 1536;
/// Time for the way back, whose rounds run in nested paging that is emulated.
const BACK: Duration = Duration::from_secs(900);
/// Options of each move. An emulator would miss any limit of the downtime.
const OPTIONS: &str = "--rounds 2 --max-throttle 0";

/// One move of the machine.
#[derive(Clone, Debug)]
pub struct Leg {
    /// The mover's own report.
    pub said: String,
    /// The longest time in which a client of PostgreSQL had no answer.
    pub silence: Duration,
}

/// The machine's way to the host and back.
#[derive(Clone, Debug)]
pub struct Trip {
    pub there: Leg,
    pub back: Leg,
    /// Memory that the monitor took at the end beside the guest's.
    pub monitor_bytes: u64,
}

/// The machines of round trips.
#[derive(Debug)]
pub struct RoundTrips {
    switch: Switch,
    kernel: Kernel,
    cpus: u32,
    nic: Nic,
    /// The machine on its hardware, and its place on the switch. `None` while it moves.
    machine: Option<Machine>,
    place: u8,
    host: Option<Machine>,
    boot_id: String,
    devices: String,
}

impl RoundTrips {
    /// Boots a machine like metal with PostgreSQL and this card, and starts its clients. More than one trip
    /// needs [`Nic::Virtio`].
    ///
    /// # Errors
    /// If a machine or PostgreSQL does not come up.
    pub fn begin(kernel: Kernel, cpus: u32, nic: Nic) -> Result<Self> {
        let switch = Switch::boot_for(kernel)?;
        let spec = as_guest::in_ram(metal(kernel, cpus)).kernel_arg("lab.with=postgres");
        let machine = switch.boot_other(switch.plug_metal_at(spec, 2, nic))?;
        plug_in(&machine, "10.9.0.2")?;
        ledger::serve(&machine)?;
        start(&machine, "clock", CLOCK, "")?;
        start(&machine, "talk", TALK, PEER)?;
        for (number, name) in CLIENTS.iter().enumerate() {
            start(&switch.peer, name, CLIENT, &number.to_string())?;
        }
        let (boot_id, devices) = (boot_id(&machine)?, devices(&machine)?);
        let (machine, host) = (Some(machine), None);
        Ok(Self { switch, kernel, cpus, nic, machine, place: 2, host, boot_id, devices })
    }

    fn machine(&self) -> Result<&Machine> {
        self.machine.as_ref().ok_or_else(|| Error::Host("the machine was lost in a move".into()))
    }

    fn other_place(&self) -> u8 {
        5 - self.place
    }

    /// Moves the machine to an equal spare.
    ///
    /// # Errors
    /// If the machine does not move, or is not well.
    pub fn to_spare(&mut self) -> Result<Leg> {
        let place = self.other_place();
        let spec = self.switch.plug_metal_at(metal(self.kernel, self.cpus), place, self.nic);
        let spare = self.switch.boot_other(spec)?;
        plug_in(&spare, "10.9.0.4")?;
        let words = receive(&spare, "10.9.0.4")?;
        self.forget_silence()?;
        let said = move_to(self.machine()?, &spare, &words, OPTIONS)?;
        self.arrived(&spare)?;
        let leg = Leg { said, silence: self.silence()? };
        (self.machine, self.place) = (Some(spare), place);
        Ok(leg)
    }

    /// Moves the machine to a host in use, where it goes on as a guest, and back to its hardware.
    ///
    /// # Errors
    /// If the machine does not move, is not well, or a connection is broken.
    pub fn there_and_back(&mut self) -> Result<Trip> {
        let host = match self.host.take() {
            Some(host) => host,
            None => self.boot_host()?,
        };
        let machine =
            self.machine.take().ok_or_else(|| Error::Host("the machine was lost in a move".into()))?;
        let options = "--json --net tap=tap0 --listen 10.9.0.3";
        let (mut guest, words) = Guest::receive(&host, options)?;
        self.forget_silence()?;
        let mut moving = machine.spawn(&migrate(&words, OPTIONS))?;
        if let Err(error) = machine.wait_moved(&mut moving, LIMIT) {
            println!("{:?} {:?}", moving.output_so_far(), moving.errors_so_far());
            println!("{:?}\n{}", guest.printed(), guest.console());
            return Err(host.blame_examined(error));
        }
        guest.wait()?;
        self.arrived(&guest)?;
        let there = Leg { said: said(&machine), silence: self.silence()? };

        let spec =
            self.switch.plug_metal_at(metal(self.kernel, self.cpus), self.place, self.nic).boot_limit(BACK);
        let repaired = machine.start_as(spec)?;
        plug_in(&repaired, "10.9.0.4")?;
        let words = receive(&repaired, "10.9.0.4")?;
        let boots = repaired.boots();
        self.forget_silence()?;
        guest.sh("test -e /usr/sbin/mercury || ln -s $(command -v mercury) /usr/sbin/mercury")?;
        let mut moving = host.spawn(&format!("exec mercury guests migrate {NAME} {words} -- {OPTIONS}"))?;
        if let Err(error) = repaired.wait_other(boots) {
            println!("{:?} {:?}", moving.output_so_far(), moving.errors_so_far());
            println!("{}", guest.console());
            return Err(host.blame_examined(error));
        }
        let monitor_bytes = monitor_bytes(&guest.ends()?)?;
        let said = moving.wait(LIMIT)?.check()?.stdout;
        self.arrived(&repaired)?;
        let found = devices(&repaired)?;
        if found != self.devices {
            let why = format!("the machine's devices are {found}, and were {}", self.devices);
            return Err(repaired.blame(Error::Unhealthy(why)));
        }
        host.check_health()?;
        let back = Leg { said, silence: self.silence()? };
        (self.machine, self.host) = (Some(repaired), Some(host));
        Ok(Trip { there, back, monitor_bytes })
    }

    fn boot_host(&self) -> Result<Machine> {
        let host = match self.other_place() {
            3 => self.switch.plugged(Kernel::BookwormCloud, 2, 1800, 3),
            _ => {
                let spec = Spec::new(Kernel::BookwormCloud).cpus(2).memory_mib(1800);
                self.switch.plug_instead(spec.qemu_version(crate::spec::Qemu::Newer))
            }
        };
        let host = self.switch.boot_other(as_guest::with_ports(host))?;
        as_guest::bridge(&host, "10.9.0.3")?;
        // The host's KVM offers no virtualization to its guests: the monitor stands in for the hypervisor.
        host.sh("modprobe kvm_amd nested=0")?;
        Ok(host)
    }

    /// Checks the machine and its connections.
    fn arrived(&self, machine: &impl System) -> Result<()> {
        is_well(machine, &self.boot_id)?;
        comes_further(machine, "talk", count(machine, "talk")? + 5)?;
        for client in CLIENTS {
            comes_further(&self.switch.peer, client, count(&self.switch.peer, client)? + 2)?;
        }
        nothing_wrong(&self.switch.peer)
    }

    fn forget_silence(&self) -> Result<()> {
        self.switch.peer.sh("rm -f /run/client*.longest").map(drop)
    }

    /// Returns the longest time without an answer since it was forgotten.
    fn silence(&self) -> Result<Duration> {
        let all = self.switch.peer.sh("cat /run/client*.longest")?;
        let longest = all.split_whitespace().filter_map(|word| word.parse().ok()).max();
        longest
            .map(Duration::from_millis)
            .ok_or_else(|| Error::Host(format!("the clients waited `{all}` ms")))
    }

    /// Ends the clients, and compares their answers with the database. The machine is native then.
    ///
    /// # Errors
    /// If the machine is not native, or the database does not answer.
    pub fn finish(self) -> Result<Ledger> {
        let machine = self.machine()?;
        machine.sh("mercury verify")?;
        let told = results(&self.switch.peer, &CLIENTS)?;
        let told: Vec<u64> = told.iter().filter_map(|count| count.parse().ok()).collect();
        Ledger::of(machine, &told)
    }
}

fn metal(kernel: Kernel, cpus: u32) -> Spec {
    as_guest::metal(kernel, cpus).memory_mib(MEMORY_MIB)
}

/// Gives the only card of a machine like metal an address.
fn plug_in(machine: &Machine, address: &str) -> Result<()> {
    machine.sh("modprobe -a e1000e virtio_net; udevadm settle || true")?;
    let card = "card=$(ls -d /sys/class/net/*/device | cut -d/ -f5 | head -1)";
    machine.sh(&format!("{card}; ip address add {address}/24 dev $card && ip link set $card up")).map(drop)
}

/// Returns the machine's devices, names and addresses.
fn devices(machine: &Machine) -> Result<String> {
    let devices = "cd /sys/bus/pci/devices; grep -H . */vendor */device; ls /sys/class/net; \
        ip -4 -o address | sed 's/^[0-9]*: //'";
    machine.sh(devices)
}

/// Returns the monitor's memory from the last of the command's JSON objects.
fn monitor_bytes(printed: &str) -> Result<u64> {
    let all = printed.match_indices('{').filter_map(|(at, _)| {
        serde_json::Deserializer::from_str(&printed[at..]).into_iter::<Value>().next()?.ok()
    });
    let bytes = all.filter_map(|one| one["monitor_bytes"].as_u64()).next_back();
    bytes.ok_or_else(|| Error::Host(format!("the monitor does not say what memory it took: {printed}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitor_s_memory_is_in_its_last_words() {
        let printed = "{\n \"key\": \"x\"\n}\nmercury: it arrives\n{\n \"end\": \"powered-off\",\n \
                       \"monitor_bytes\": 7\n}\n";
        assert_eq!(monitor_bytes(printed).ok(), Some(7));
        assert!(monitor_bytes("{}").is_err());
    }
}
