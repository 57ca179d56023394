//! Manual pages and shell completions, made from the definition of the command line.

use std::{fs, io, path::Path};

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate_to};

use crate::args::{Cli, TABLE};

const NAME: &str = "afterburner";
/// Section of the manual: user commands.
const SECTION: &str = "1";

/// Writes a manual page for the command and one for each of its visible subcommands.
///
/// # Errors
/// A file cannot be written.
pub fn man(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = Cli::command();
    command.build();
    page(&command, directory, NAME)
}

fn page(command: &Command, directory: &Path, name: &str) -> io::Result<()> {
    let title = name.replace(' ', "-");
    let named = command.clone().name(title.clone()).bin_name(name).after_help(TABLE);
    let mut text = Vec::new();
    clap_mangen::Man::new(named).title(title.to_uppercase()).section(SECTION).render(&mut text)?;
    fs::write(directory.join(format!("{title}.{SECTION}")), text)?;
    let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(visible)
        .try_for_each(|sub| page(sub, directory, &format!("{name} {}", sub.get_name())))
}

/// Writes the completions for bash, zsh and fish.
///
/// # Errors
/// A file cannot be written.
pub fn completions(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Cli::command(), NAME, directory)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_completions_for_all_that_is_visible() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        completions(directory.path()).unwrap();
        let mut names: Vec<_> = fs::read_dir(directory.path())
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "_afterburner",
                "afterburner-list.1",
                "afterburner-make.1",
                "afterburner-verify.1",
                "afterburner.1",
                "afterburner.bash",
                "afterburner.fish"
            ]
        );
        let page = fs::read_to_string(directory.path().join("afterburner-verify.1")).unwrap();
        assert!(page.contains("accounted for"));
    }
}
