//! Real work across a move: it goes on without a gap, and its results are right.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/workloads/mod.rs"]
mod workloads;

use mercury_lab::{
    Background, Kernel, Machine, Result,
    error::wait_for,
    moving::{LIMIT, MOVING, PEER, Switch},
    restart::{comes_further, count, nothing_wrong, results, script::BUILDS, start},
};
use mercury_lab_bench::soak::migration::{Plan, run};
use workloads::{
    moves::{Scene, moves},
    restart::need_qemu,
};

/// Processes that compute together, over TCP.
const RANK: &str = include_str!("../../guest/migration/rank");
/// The processes' names, and the number of the machine of each: all neighbours of a process are on
/// the other machine.
const RANKS: [(&str, usize); 4] = [("rank0", 0), ("rank1", 1), ("rank2", 0), ("rank3", 1)];
/// The same computation on one machine.
const ALONE: [&str; 4] = ["alone0", "alone1", "alone2", "alone3"];

/// Starts one of the processes. `words` are the addresses of all, their first port, and the number
/// of steps if it is known.
fn compute(machine: &Machine, name: &str, number: usize, words: &str) -> Result<()> {
    start(machine, name, RANK, &format!("{number} {words}"))
}

/// Returns the results of a computation on the machines of [`RANKS`], and of the same computation
/// on one machine that never moves.
fn computed(machines: [&Machine; 2]) -> Result<[Vec<String>; 2]> {
    // The first process makes all others end.
    let mut found = results(machines[0], &["rank0", "rank2"])?;
    let moved = results(machines[1], &["rank1", "rank3"])?;
    found.splice(1..1, [moved[0].clone()]);
    found.push(moved[1].clone());
    let steps = found[0].split(' ').next().unwrap();
    for (number, name) in ALONE.iter().enumerate() {
        compute(machines[0], name, number, &format!("{} 7800 {steps}", [PEER; 4].join(",")))?;
    }
    Ok([found, results(machines[0], &ALONE)?])
}

/// Streams in both directions, by iperf3.
struct Stream(Background);

impl Stream {
    /// The time for which iperf3 waits for a machine that stands still, in milliseconds.
    const PATIENCE: u32 = 900_000;

    fn begin(peer: &Machine, machine: &Machine) -> Result<Self> {
        let patience = format!("--rcv-timeout {}", Self::PATIENCE);
        machine.sh(&format!("iperf3 -s -D {patience} --logfile /run/iperf3.said"))?;
        let line = format!("exec iperf3 -c {MOVING} --bidir -b 4M -t 86400 --forceflush {patience}");
        let mut stream = Self(peer.spawn(&line)?);
        stream.flows(3)?;
        Ok(stream)
    }

    /// Returns the seconds in which data has come, in this direction.
    fn seconds(&mut self, direction: &str) -> Result<usize> {
        let said = self.0.output_so_far()?;
        let came = |line: &&str| line.contains(direction) && !line.contains(" 0.00 Bytes ");
        Ok(said.lines().filter(came).count())
    }

    /// Waits until data has come in so many more seconds, in both directions.
    fn flows(&mut self, more: usize) -> Result<()> {
        for direction in ["[TX-C]", "[RX-C]"] {
            let end = self.seconds(direction)? + more;
            wait_for("iperf3's bytes", LIMIT * 2, || {
                let has_ended = self.0.has_ended()?;
                assert!(!has_ended, "{}{}", self.0.output_so_far()?, self.0.errors_so_far()?);
                Ok((self.seconds(direction)? >= end).then_some(()))
            })?;
        }
        Ok(())
    }

    /// Ends the stream by its client, and checks that nothing ended it before.
    fn end(self, machine: &Machine) -> Result<String> {
        const SIGINT: i32 = 2;
        self.0.kill(SIGINT)?;
        let said = self.0.wait(LIMIT)?;
        let complaint = said.stderr.replace("iperf3: interrupt - the client has terminated", "");
        assert_eq!(complaint.trim(), "", "{said:?}");
        let server = machine.sh("cat /run/iperf3.said; pkill iperf3")?;
        let other =
            server.lines().find(|line| line.contains("error") && !line.contains("client has terminated"));
        assert_eq!(other, None, "{server}");
        let (_, summary) = said.stdout.rsplit_once("- - -").unwrap();
        Ok(summary.to_owned())
    }
}

/// Moves one of two machines of a computation to a third machine. The result must equal that of an
/// unmoved computation. Builds with make and gcc must be the same to the bit, and iperf3 streams in
/// both directions.
#[test]
#[ignore = "long"]
fn a_node_of_a_computation_moves_while_it_builds_and_streams() -> Result<()> {
    need_qemu()?;
    let Scene { switch: Switch { peer, .. }, machine, destination } =
        &Scene::new(Kernel::BookwormCloud, 2, 768)?;
    start(machine, "builds", BUILDS, "")?;
    let addresses = [PEER, MOVING, PEER, MOVING].join(",");
    for (number, (name, place)) in RANKS.into_iter().enumerate() {
        compute([peer, machine][place], name, number, &format!("{addresses} 7700"))?;
    }
    comes_further(peer, "rank0", 20)?;
    let mut stream = Stream::begin(peer, machine)?;

    let names = ["builds", "rank1", "rank3"];
    let counts =
        |machine: &Machine| names.iter().map(|name| count(machine, name)).collect::<Result<Vec<_>>>();
    let before = counts(machine)?;
    moves(peer, machine, destination, "10.9.0.3", "--rounds 2 --max-throttle 0")?;
    stream.flows(5)?;
    let after = counts(destination)?;
    for (name, count) in names.iter().zip(&after) {
        comes_further(destination, name, count + 1)?;
    }
    println!("builds and steps: {before:?} before the move, {after:?} when it had arrived");
    println!("{}", stream.end(destination)?);
    let [moved, alone] = computed([peer, destination])?;
    assert_eq!(moved, alone);
    println!("{moved:?}; {:?} builds", results(destination, &["builds"])?);
    nothing_wrong(peer)?;
    destination.check_next_attach()
}

/// Moves PostgreSQL with clients outside, there and back, as the soak does.
#[test]
#[ignore = "long"]
fn a_database_moves_and_comes_back() -> Result<()> {
    run(Plan { kernel: Kernel::BookwormCloud, cpus: 2, memory_mib: 512, moves: 2, time: None })?.check()
}
