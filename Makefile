# The commands of this repository. `make` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv/bin
LAB_NAME ?= lab
export LAB_NAME
export PATH := $(CURDIR)/$(VENV):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: mutate help bootstrap engine check lint types unit test test-all test-lab demo lab-up lab-down lab-purge lab-shell lab-status

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1|/' | column -t -s '|'

bootstrap: ## the Python environment in .venv
	@tools/bootstrap

engine: ## the environment and a Docker engine for the lab
	@tools/bootstrap docker

demo: engine ## the main job on two simulated Sparks: lab, site.yml, one chat completion
	@python tools/demo

check: bootstrap lint types unit ## lint, types and unit tests; before each commit (about 2 minutes)

lint:
	@ruff check --quiet . && ruff format --check --quiet .
	@vermin -q --no-tips --eval-annotations --exclude file --target=3.9- --violations plugins/module_utils plugins/modules node
	@yamllint -c .config/yamllint.yml .
	@ansible-lint -q -c .config/ansible-lint.yml
	@git ls-files '*Dockerfile*' | xargs hadolint
	@git grep -lIE '^#!/(usr/)?bin/(env )?(ba|da)?sh( |$$)' | xargs shellcheck

types:
	@mypy

unit:
	@pytest tests/unit -n 2

test: check test-lab ## check, then the whole job on the two-node lab (about 30 minutes)

test-lab: engine
	@tests/run default

test-all: check engine ## every shard of the lab tests
	@tests/run all

lab-up: engine ## bring up the two simulated Sparks
	@python -m lab up

lab-down: ## remove the lab's containers, keep its caches
	@python -m lab down

lab-purge: ## remove all that the lab ever made
	@python -m lab purge

lab-shell: ## a shell in a node: make lab-shell NODE=spark-1
	@python -m lab shell $(or $(NODE),spark-1)

lab-status: ## what the lab is doing
	@python -m lab status

mutate: bootstrap ## change each number of split and budget and see a test fail (about half an hour)
	@tools/mutate
