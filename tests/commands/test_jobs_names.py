"""Promise: a name that a place would refuse is refused here, in a line, before it is submitted."""

import pytest
from pydantic import ValidationError

from tests.helpers.job_files import PLACES, job
from trainer.commands.submit import container, kubernetes
from trainer.commands.submit.spec import JobSpec, Site
from trainer.commands.submit.submit import JOB_PLACES as HOW
from trainer.errors import BadInputError

HEX = 64 * "a"


@pytest.mark.parametrize(
    "image",
    [
        "Trainer:Latest", "reg/x@sha256:123", f"reg/x@sha256:{HEX.upper()}", f"reg/x@sha256:{HEX}0", "reg/x@",
        f"reg/x@md5:{HEX}", "reg//x", "reg/x:", "reg/x:-tag", "reg/x:a b", "-reg/x", "reg/x-", "reg/.x",
        "reg_/x:1/",
        "https://reg/x", "docker://reg/x", "reg:port/x", "reg/x___y", "x\n",
        f"reg/x:{129 * 'a'}", f"reg/{256 * 'x'}",
        "reg/ü", "x:\N{ARABIC-INDIC DIGIT ONE}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["job", "docker"])
def test_an_image_that_no_engine_reads_is_refused(where: str, image: str) -> None:
    with pytest.raises(BadInputError, match=r"--image (?s:.*): no reference: HOST/NAME in lower case"):
        place, site, _ = PLACES[where]
        HOW[place].render(job(where, image=image), site)


@pytest.mark.parametrize(
    "image",
    [
        "trainer", "trainer:torch2.9-cu128-train", "localhost:5000/a/b:T_1.x",
        f"reg.example/x:1@sha256:{HEX}",
        "[fd00::1]:5000/x", "a/b__c/d--e.f:v", f"10.0.0.1/x@sha512:{2 * HEX}", "Host/x", f"reg/x:{128 * 'a'}",
    ],
)  # fmt: skip
def test_an_image_that_engines_read_is_taken(image: str) -> None:
    assert container.check_image(JobSpec(recipe="digits", image=image)) == image


ODD = ("Runs_A", "-", "a..b", "a-.b", ".a", "a/b", "", 254 * "a", "a\n", "ü", "a b")


@pytest.mark.parametrize("name", ODD)
def test_names_that_the_api_server_refuses(name: str) -> None:
    for what in ("runs", "data", "cache"):
        with pytest.raises(
            BadInputError, match=f"--{what} pvc:(?s:.*): .* is no name of a claim: a name there has"
        ):
            kubernetes.render(job("job", **{what: f"pvc:{name}"}), Site())
    for key in ("namespace", "queue", "service_account"):
        with pytest.raises(ValidationError):
            Site.model_validate({key: name})
    with pytest.raises(BadInputError, match=r"--env-from secret:(?s:.*) names no Secret"):
        kubernetes.render(job("job"), Site(env_from=(f"secret:{name}",)))


def test_a_namespace_has_no_dots_and_labels_are_short() -> None:
    assert Site(namespace="a-1", queue="team.a", service_account="x.y-z").queue == "team.a"
    for key, value in (("namespace", "a.b"), ("namespace", 64 * "a"), ("queue", 64 * "a"), ("rdma", "-/x=1")):
        with pytest.raises(ValidationError):
            Site.model_validate({key: value})
