"""A few lines of every format, as small as they can be and still show its quirks."""

from __future__ import annotations

import json

PLAIN = "job_id,submit_time,duration,num_gpus\na,0,10,1\nb,5,20,2\n"
TIRESIAS = """\
job_id,num_gpu,submit_time,iterations,model_name,duration,interval
0,1,0,606,vgg19,164,30
1,8,30,133,vgg11,147,23
"""
TF_JOB = """\
job_id,num_gpu,submit_time,start_time,duration,model_size,aggr_interval,model_name,model_scale
10,12,11,14,20,400,0,vgg19,1
"""
MURI = """\
job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_time_0,priority
0,8,0,10956,gpt2,4,5095000,91000,437,0.6,0
1,8,1534000,1463,vgg16,16,281500,28000,214,82,1
"""
ELASTICFLOW = """\
job_id,submit_time,real_iteration,model_name,ddl,batch_size,num_gpu,real_duration,duration,iteration
0,0,1282877,vgg16,771220,256,1,976570,976571,1282877
"""
HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1,uA,vcJ,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0
2,uB,vch,0,16,1,FAILED,2020-06-09 18:41:02,2020-06-09 18:41:02,2020-06-09 18:45:36,249,0
3,uB,vch,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0
"""
KALOS = """\
job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,fail_time,duration,queue,gpu_time
d1,uf,8,64,960,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16+00:00,,18,10.0,1152
d2,uf,1,8,96,Other,COMPLETED,2023-05-17 19:01:58+08:00,2023-05-17 19:02:00+08:00,2023-05-17 19:02:05+08:00,,5,2.0,40
"""
OPENB = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
p0,12000,16384,1,460,,LS,Running,0,100,10
p1,12000,16384,2,1000,V100M16|V100M32,BE,Failed,5,50,
p2,6000,12288,0,0,,LS,Running,7,100,8
"""
SPOT = """\
job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
239255,13,A10,20,2,3,0,2764799,HP
"""
MORPHLING = """\
name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla
vit-0,0,3163.09,vit,2,16,0,zero-dp,37239,0
"""
POLLUX = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:13:03,2951.0,1,2951.0,6214e9
"""
SIA = """\
name,time,application,num_replicas,batch_size
cifar10-0,107,cifar10,6,2048
bert-1,110,bert,4,384
"""
STEP = "python3 main.py --data %s\t"
GAVEL_7 = f"LM (batch size 10)\t{STEP}--steps\t1\t1433605\t5.000000\t4\n"
GAVEL_10 = f"Transformer (batch size 128)\t{STEP}translation\t-step\t1\t19605\t1\t1\t-1.000000\t7\n"
GAVEL_12 = f"LM (batch size 10)\t{STEP}language\t--steps\t1\t134583\t2\tgns\t1\t-1.000000\t1418\t9\n"
SWF = """\
; Version: 2.2
; UnixStartTime: 1038000000

  1   0  10  3600  8 -1 -1  4 7200 -1 1 3 1 -1 2 -1 -1 -1
  2  60  -1   100 16 -1 -1 -1 7200 -1 0 4 1 -1 2 -1 -1 -1
  3  90  -1    -1 16 -1 -1 16 7200 -1 5 4 1 -1 2 -1 -1 -1
"""
TIMES = "2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:01:00|3600"
SACCT = f"""\
JobID|Submit|Start|End|ElapsedRaw|State|User|Account|Partition|AllocTRES|NNodes|JobName
100|{TIMES}|COMPLETED|ann|phys|gpu|billing=8,cpu=8,gres/gpu=8,gres/gpu:a100=8,node=2|2|train "big"
100.batch|{TIMES}|COMPLETED||phys||cpu=8,gres/gpu=8|1|batch
100.extern|{TIMES}|COMPLETED||phys||cpu=8|1|extern
12_3|2024-01-01T00:10:00|None|None|60|CANCELLED by 1000|bob|bio|gpu|gres/gpu:v100=2,gres/gpu:a100=1|1|sweep
101|2024-01-01T00:20:00|None|None|600|FAILED|bob|bio|cpu|cpu=4,mem=4G,node=1|1|cpuonly
102|2024-01-01T00:30:00|Unknown|Unknown|0|PENDING|bob|bio|gpu||1|waits
"""
PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "j1",
        "user": "ce2f4c",
        "submitted_time": "2017-10-07 01:11:39",
        "attempts": [
            {
                "start_time": "2017-10-07 01:12:09",
                "end_time": "2017-10-07 01:13:23",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
            {
                "start_time": "2017-10-07 01:13:30",
                "end_time": "2017-10-07 01:13:40",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
            },
            {"start_time": "2017-10-07 01:14:00", "end_time": "None", "detail": []},
            {"start_time": None, "end_time": "", "detail": None},
        ],
    },
    {
        "status": "Killed",
        "vc": "x",
        "jobid": "j2",
        "user": None,
        "submitted_time": "2017-10-06 01:00:00",
        "attempts": [],
    },
]
PAI_TASKS = """\
4f05,tensorflow,1.0,Terminated,1739162.0,1739200.0,600.0,29.296875,50.0,MISC
8ca1,worker,10.0,Terminated,1739100.0,1739200.0,600.0,29.3,100.0,V100
8ca1,ps,2.0,Terminated,1739100.0,1739200.0,600.0,29.3,,
77aa,worker,1.0,Running,1739300.0,,600.0,29.3,100.0,T4
"""
PAI_JOBS = """\
8ca1,8cb3,5854,Terminated,1739000.0,1739416.0
"""

SAMPLES = {
    "normalised": PLAIN,
    "tiresias": TIRESIAS,
    "muri": MURI,
    "elasticflow": ELASTICFLOW,
    "helios": HELIOS,
    "acme": KALOS,
    "openb": OPENB,
    "spot": SPOT,
    "morphling": MORPHLING,
    "pollux": POLLUX,
    "sia": SIA,
    "gavel": GAVEL_10,
    "swf": SWF,
    "slurm": SACCT,
    "philly": json.dumps(PHILLY),
    "pai": PAI_TASKS,
}
