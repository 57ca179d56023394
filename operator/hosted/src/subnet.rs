//! Subnets of hosted machines: the process that keeps one, and the list of them. Regions have such a process.

use std::{fs, io::Write};

use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    output::{Render, Text},
    say::Say,
};
use mercury_hosted::region;
use mercury_hosted_options::{
    KeepRegionArgs,
    net::{Mac, SubnetName},
    region::RegionOption,
};
use mercury_subnet::{error, keeper::Keeper, member, place::Folder};
use serde::Serialize;

/// Keeps a subnet until its last machine has left. The machine that starts this process reads the output to
/// its end: nothing if the subnet can be reached, or what went wrong.
pub fn keep(name: &SubnetName) -> Result<Exit> {
    let host = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let addresses = |slot: usize| Mac::of(&host, &format!("subnet {name} {slot}")).0;
    let folder = Folder::own();
    let started = Keeper::start(&folder, name, &addresses);
    if let Err(error) = &started {
        // The machine shows the text.
        let _ = write!(std::io::stdout(), "{}", error.message());
    }
    leave_output().map_err(|error| {
        Error::new(Exit::Failed, format!("cannot open /dev/null: {error}")).hint("make /dev/null readable")
    })?;
    started.and_then(Keeper::serve).map(|()| Exit::Done).map_err(refused)
}

/// Keeps a region as [`keep`] keeps a subnet.
pub fn keep_region(args: &KeepRegionArgs) -> Result<Exit> {
    let option = RegionOption { name: args.name.clone(), bytes: args.bytes };
    let started = region::Keeper::start(&region::Folder::own(), &option);
    if let Err(error) = &started {
        let _ = write!(std::io::stdout(), "{}", error.message());
    }
    let failed = |error| {
        Error::new(Exit::Failed, format!("cannot keep the region: {error}"))
            .hint("make sure that the host has memory and descriptors, and /dev/null")
    };
    leave_output().map_err(failed)?;
    started.map_err(crate::refused)?.serve().map(|()| Exit::Done).map_err(failed)
}

/// Leaves the output to the process that waits for its end.
fn leave_output() -> std::io::Result<()> {
    let nothing = fs::File::options().write(true).open("/dev/null")?;
    Ok(rustix::stdio::dup2_stdout(nothing)?)
}

fn refused(error: error::Error) -> Error {
    let plain = Error::new(Exit::Failed, error.message());
    plain.hint(error.remedy().unwrap_or("end the machines of the subnet, and start them again"))
}

/// Shows the subnets and their machines.
pub fn list(only: Option<&SubnetName>, say: Say<'_>) -> Result<Exit> {
    let folder = Folder::own();
    let names = match only {
        Some(name) => vec![name.clone()],
        None => folder.names().map_err(refused)?,
    };
    let mut subnets = Vec::new();
    for name in names {
        if let Some(members) = member::list(&folder, &name).map_err(refused)? {
            let mut machines: Vec<Machine> = members.into_iter().map(Machine::from).collect();
            machines.sort_by_key(|one| one.slot);
            subnets.push(Subnet { name: name.to_string(), machines });
        } else if only.is_some() {
            return Err(Error::new(Exit::Failed, format!("there is no subnet {name}"))
                .hint("`mercury hosted net` lists those that are there"));
        }
    }
    Ok(say.done(&Subnets { subnets }))
}

/// The subnets of a user.
#[derive(Debug, Serialize)]
struct Subnets {
    subnets: Vec<Subnet>,
}

#[derive(Debug, Serialize)]
struct Subnet {
    name: String,
    machines: Vec<Machine>,
}

#[derive(Debug, Serialize)]
struct Machine {
    /// The place on the subnet, from 0.
    slot: u8,
    mac: String,
    /// The process of the machine.
    pid: u32,
}

impl From<member::Member> for Machine {
    fn from(member: member::Member) -> Self {
        Self { slot: member.slot, mac: Mac(member.address).to_string(), pid: member.process }
    }
}

impl Render for Subnets {
    fn render(&self, text: &mut Text) {
        if self.subnets.is_empty() {
            return text.line("no machine of yours is on a subnet");
        }
        let heading = ["SUBNET", "SLOT", "MAC", "PID"].map(str::to_owned).to_vec();
        let rows = self.subnets.iter().flat_map(|subnet| {
            let row = |one: &Machine| {
                vec![subnet.name.clone(), one.slot.to_string(), one.mac.clone(), one.pid.to_string()]
            };
            subnet.machines.iter().map(row)
        });
        let all: Vec<Vec<String>> = std::iter::once(heading).chain(rows).collect();
        text.table(&all);
    }
}
